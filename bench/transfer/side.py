"""A process that is one side: `python -m bench.transfer.side source|target SUBJECT OPTIONS`.

It obeys orders on standard input, one JSON object a line, and answers each with another.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any, BinaryIO

from bench.transfer.trees import TreeSpec

_SIDES: dict[str, tuple[str, str | None, str]] = {
    "raw tcp": ("bench.transfer.plain", "RawSource", "RawTarget"),
    "memcpy": ("bench.transfer.plain", None, "CopyTarget"),
    "holdfast": ("bench.transfer.ours", "OurSource", "OurTarget"),
    "jax": ("bench.transfer.peers", "JaxSource", "JaxTarget"),
    "ray": ("bench.transfer.peers", None, "RayTarget"),
    "gloo": ("bench.transfer.peers", "GlooSource", "GlooTarget"),
}
"""Module, source and target. Where there is no source, the target sees to both."""


def has_source(subject: str) -> bool:
    """Whether its source is a process of this module."""
    return _SIDES[subject][1] is not None


def _made(role: str, subject: str, about: dict[str, Any], orders: BinaryIO) -> tuple[Any, dict[str, Any]]:
    """The side, and the first thing that it says. A target hears where its source is before that."""
    module, source, target = _SIDES[subject]
    room = import_module(module)
    spec = TreeSpec(**about["tree"])
    if role == "source":
        assert source is not None
        side = getattr(room, source)(spec, about["options"])
        return side, {"address": side.address, "digest": side.digest}
    address = json.loads(orders.readline())["address"]
    return getattr(room, target)(spec, address, about["options"]), {}


def _done(side: Any, order: dict[str, Any]) -> Any:
    match order["do"]:
        case "offer":
            return side.offer(order["number"])
        case "take":
            return side.take(order["number"], order["checked"])
        case "again":
            return side.again(order["times"])
        case "digest":
            return side.digest()
        case "close":
            return side.close()
    raise ValueError(order)


def main() -> None:
    """Obey until the input ends."""
    role, subject, about = sys.argv[1:]
    orders = os.fdopen(os.dup(0), "rb")
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a peer prints must not end up among the answers
    side, first = _made(role, subject, json.loads(about), orders)
    print(json.dumps(first), file=out, flush=True)
    for line in orders:
        print(json.dumps(_done(side, json.loads(line))), file=out, flush=True)
    os._exit(0)  # jaxlib and gloo may wait, or abort, when the other side is gone


if __name__ == "__main__":
    main()
