"""Layer patterns: one symbol for each residual block, as in `*-` (attention, then MLP).

The symbols are those of Megatron-LM's hybrid models. What is not built yet is known by name, so that a
pattern that is right elsewhere is refused with a reason and not as a typing mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from holdfast.train.problems import Problem

ATTENTION: Final = "*"
MLP: Final = "-"

BUILT: Final[Mapping[str, str]] = {ATTENTION: "attention", MLP: "MLP"}
"""Symbols that build a layer. A new kind of layer is a line here and one in `decoder.KINDS`."""

LATER: Final[Mapping[str, str]] = {
    "E": "mixture of experts",
    "M": "Mamba-2",
    "G": "gated delta net",
    "D": "sparse attention",
    "+": "latent attention",
    "|": "pipeline stages",
    "/": "multi-token prediction",
}
"""Symbols that Megatron-LM's patterns have and this version does not build."""


def pattern_problems(setting: str, pattern: str) -> list[Problem]:
    """What is wrong with a pattern: each symbol once."""
    built = " and ".join(f"{symbol!r} ({name})" for symbol, name in BUILT.items())
    if not pattern:
        return [Problem(setting, "is empty", f"use {built}, as in '*-'")]
    found = []
    for symbol in dict.fromkeys(pattern):
        if symbol in LATER:
            message = f"is {pattern!r}, and {symbol!r} ({LATER[symbol]}) comes in a later version"
            found.append(Problem(setting, message, f"use {built}"))
        elif symbol not in BUILT:
            found.append(Problem(setting, f"is {pattern!r}, and {symbol!r} is no layer", f"use {built}"))
    return found
