"""Which replica has other parameters than the rest, and in which arrays. Pure.

Replicas of one run hold the same bits. Every n steps each tells the others the fingerprints of its arrays,
and a step later, when all that still take part have told theirs, each looks at all of them and comes to the
same verdict. Nobody waits for anybody: the sum of the step in between was wait enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from holdfast.train.fingerprint import differences

Prints = Mapping[str, str]
_NAMED: Final = 8
"""Arrays that a message names; beyond them it says how many more there are."""


class Verdict(NamedTuple):
    """What is wrong: the slots whose state is not the run's, and the arrays of each."""

    corrupt: dict[int, list[str]]
    """Empty where no majority says which side is right."""
    sides: tuple[tuple[int, ...], ...]
    """Slots that agree with each other, the largest group first."""
    arrays: list[str]
    """Every array in which any two differ."""

    def __str__(self) -> str:
        if self.corrupt:
            told = [f"slot {slot} differs in {_listed(names)}" for slot, names in self.corrupt.items()]
            return "; ".join(told)
        sides = " and ".join(f"slots {', '.join(map(str, side))}" for side in self.sides)
        return f"{sides} differ in {_listed(self.arrays)}, and no majority says which is right"


def verdict(reports: Mapping[int, Prints]) -> Verdict | None:
    """What the fingerprints of all slots say; None if they agree."""
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for slot in sorted(reports):
        groups.setdefault(tuple(reports[slot].items()), []).append(slot)
    if len(groups) < 2:
        return None
    sides = sorted(groups.values(), key=lambda side: (-len(side), side))
    right = sides[0] if 2 * len(sides[0]) > len(reports) else None
    corrupt = {}
    if right is not None:
        truth = reports[right[0]]
        corrupt = {slot: differences(truth, reports[slot]) for slot in sorted(reports) if slot not in right}
    arrays = sorted(
        {name for side in sides[1:] for name in differences(reports[sides[0][0]], reports[side[0]])}
    )
    return Verdict(corrupt, tuple(tuple(side) for side in sides), arrays)


class Report(msgspec.Struct, frozen=True, array_like=True):
    """What a replica tells: its fingerprints after so many steps. The two latest ones."""

    prints: dict[int, dict[str, str]]

    def with_step(self, step: int, prints: Prints) -> Report:
        """This report after another check."""
        kept = dict(sorted({**self.prints, step: dict(prints)}.items())[-2:])
        return Report(kept)

    def encoded(self) -> bytes:
        return msgspec.msgpack.encode(self)


def reports_of(words: Mapping[int, bytes], step: int) -> dict[int, Prints]:
    """The fingerprints of `step` that the slots told, of those that told any."""
    decode = msgspec.msgpack.Decoder(Report).decode
    found = {slot: decode(word).prints.get(step) for slot, word in words.items()}
    return {slot: prints for slot, prints in found.items() if prints is not None}


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
