"""Who makes up the next generation, in which slots, with which lanes. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from holdfast.coord.settings import Settings


class Candidate(NamedTuple):
    """A client that waits to be in the next generation. `slot` is the one it asks for, or -1."""

    sid: int
    slot: int
    since: float
    spare: bool


class Verdict(NamedTuple):
    """The members of the next generation, or until when to wait for more (inf: for whoever comes next)."""

    chosen: tuple[int, ...] | None
    wait_until: float = math.inf


def usable(count: int, settings: Settings) -> int:
    """The largest allowed size that `count` clients can fill; 0 if there is none."""
    size = min(count, settings.max_size) // settings.divisible_by * settings.divisible_by
    return size if size >= settings.min_size else 0


def verdict(
    settings: Settings,
    candidates: Sequence[Candidate],
    previous: Mapping[int, int],
    outsiders: int,
    *,
    since: float,
    enough_since: float,
    now: float,
    again: bool = False,
) -> Verdict:
    """Whether the candidates can go on without those who are not there.

    `previous` are the members of the last generation that are alive, sid to slot; empty for the first one.
    `outsiders` are clients that are alive and could come in but have not asked. `since` is when the round
    began, `enough_since` when there were enough for the smallest generation. `again`: there was a generation
    before, of which nobody may be left; whoever is late comes into the one after.
    """
    closed = settings.shrink_only and bool(previous)
    able = [c for c in candidates if not closed or c.sid in previous]
    size = usable(len(able), settings)
    if not size:
        return Verdict(None)
    missing = len(previous) - sum(c.sid in previous for c in able)
    # More than half of those who are alive: two halves of a run must never both go on.
    alive = len(previous) + sum(c.sid not in previous for c in able)
    if previous and 2 * len(able) <= alive:
        return Verdict(None)
    if missing:
        until = since + settings.straggler_s
    elif closed or size == usable(settings.max_size, settings):
        until = now
    elif previous and usable(len(able) + outsiders, settings) == size:
        until = now  # whoever could still come would not make it larger
    else:
        call_s = min(settings.last_call_s, settings.recall_s) if again else settings.last_call_s
        until = enough_since + call_s
    if until > now:
        return Verdict(None, until)
    return Verdict(_chosen(able, previous, size))


def _chosen(able: Iterable[Candidate], previous: Mapping[int, int], size: int) -> tuple[int, ...]:
    """Members of the last generation first, then those who ask for a slot, then others; spares last."""

    def rank(c: Candidate) -> tuple[bool, int, bool, bool, float, int]:
        return (c.sid not in previous, previous.get(c.sid, 0), c.spare, c.slot < 0, c.since, c.sid)

    return tuple(c.sid for c in sorted(able, key=rank)[:size])


def slots_of(chosen: Sequence[int], previous: Mapping[int, int], wanted: Mapping[int, int]) -> dict[int, int]:
    """A slot (0..n-1) for each of the n chosen, slot to sid.

    Members of the last generation stay where they are; only those beyond the end move, into the holes.
    """
    size = len(chosen)
    held: dict[int, int] = {}
    rest: list[int] = []
    for sid in chosen:
        slot = previous.get(sid, -1)
        if 0 <= slot < size:
            held[slot] = sid
    for sid in chosen:
        if held.get(previous.get(sid, -1)) == sid:
            continue
        slot = wanted.get(sid, -1)
        if 0 <= slot < size and slot not in held:
            held[slot] = sid
        else:
            rest.append(sid)
    free = iter(slot for slot in range(size) if slot not in held)
    held.update(zip(free, rest, strict=False))
    return dict(sorted(held.items()))


def lanes_of(
    num_lanes: int, slots: Mapping[int, int], previous: Mapping[int, Sequence[int]]
) -> dict[int, tuple[int, ...]]:
    """The lanes of each slot, as even as can be, moving as few as can be.

    `previous` are the lanes that each sid had. Whoever had most keeps one more where they do not divide
    evenly.
    """
    had = {slot: [x for x in sorted(previous.get(sid, ())) if x < num_lanes] for slot, sid in slots.items()}
    share, extra = divmod(num_lanes, len(slots))
    by_need = sorted(slots, key=lambda slot: (-len(had[slot]), slot))
    quota = {slot: share + (at < extra) for at, slot in enumerate(by_need)}
    kept = {slot: had[slot][: quota[slot]] for slot in slots}
    taken = {lane for lanes in kept.values() for lane in lanes}
    free = iter(lane for lane in range(num_lanes) if lane not in taken)
    for slot in sorted(slots):
        while len(kept[slot]) < quota[slot]:
            kept[slot].append(next(free))
    return {slot: tuple(sorted(lanes)) for slot, lanes in kept.items()}


def compact(slots: Iterable[int]) -> str:
    """Slots for people: `0-3, 7`."""
    runs: list[list[int]] = []
    for slot in sorted(set(slots)):
        if runs and slot == runs[-1][1] + 1:
            runs[-1][1] = slot
        else:
            runs.append([slot, slot])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
