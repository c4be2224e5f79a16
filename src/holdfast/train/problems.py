"""A mistake in a config, and how all of them are reported at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from holdfast.errors import ConfigError


@final
@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: the setting to change, what is wrong with it, and what would be right."""

    setting: str
    """Its dotted path from the root of the run's config, as on the command line: `model.hidden`."""
    message: str
    """What is wrong, with the value seen: `is 100, which 8 heads do not divide`."""
    hint: str
    """What would work: `96 or 104`."""

    def __str__(self) -> str:
        return (
            f"{self.setting} {self.message}; {self.hint}" if self.hint else f"{self.setting} {self.message}"
        )


def refuse(problems: Iterable[Problem]) -> None:
    """Nothing, if there are no problems. Fails: ConfigError, which lists every one of them."""
    lines = [str(problem) for problem in problems]
    if lines:
        raise ConfigError(lines)


def at_least(setting: str, value: float, least: float) -> list[Problem]:
    """A problem if `value` is less than `least`."""
    if value >= least:
        return []
    return [Problem(setting, f"is {value}", f"it must be {least} or more")]


def one_of(setting: str, value: str, choices: Iterable[str]) -> list[Problem]:
    """A problem if `value` is none of `choices`; the likeliest one is named first."""
    known = list(choices)
    if value in known:
        return []
    close = difflib.get_close_matches(value, known, n=1)
    ask = f"did you mean {close[0]!r}? " if close else ""
    return [Problem(setting, f"is {value!r}", f"{ask}choose one of {', '.join(known)}")]
