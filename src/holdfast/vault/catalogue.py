"""What vaults hold, as one text; and which whole states can be put together from several of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from holdfast.errors import VaultError

CATALOGUE: Final = "catalogue"
"""The name under which a vault publishes its catalogue; versions count its changes."""
ENTRIES: Final = "entries"
_MAX_CHOICES: Final = 8
"""Ways to put one state together that are tried before an older one is."""


class Held(msgspec.Struct, frozen=True, array_like=True):
    """One rank's part of one staged state, and the endpoint that offers it.

    `origin` is empty for a state of the vault's own node, else the node that it is a copy from. One that is
    not `settled` is being verified, because its trainer has just died.
    """

    run: str
    folder: str
    step: int
    attempt: str
    rank: int
    world: int
    nbytes: int
    address: str
    origin: str = ""
    settled: bool = True


_DECODER: Final = msgspec.json.Decoder(tuple[Held, ...])


def encode_catalogue(entries: Iterable[Held]) -> str:
    return msgspec.json.encode(tuple(entries)).decode()


def decode_catalogue(text: str) -> tuple[Held, ...]:
    """Fails: VaultError."""
    try:
        return _DECODER.decode(text)
    except msgspec.MsgspecError as error:
        raise VaultError(f"a vault sent a catalogue that is none: {error}") from error


class Offered(NamedTuple):
    """Where an endpoint has a save: a name for the launch that made it, a version within it.

    Ranks count the saves of a launch alike, so both are the same in every vault; and versions only grow, also
    when a restarted trainer saves an earlier step again.
    """

    name: str
    version: int


def offered(attempt: str) -> Offered:
    session, _, number = attempt.rpartition("-")
    if session and number.isdigit():
        return Offered(session, int(number))
    return Offered(attempt, 0)


class Whole(NamedTuple):
    """A state of which every rank's part is held somewhere; `parts[rank]` are its holders, best first."""

    step: int
    attempt: str
    parts: tuple[tuple[Held, ...], ...]

    @property
    def settled(self) -> bool:
        return all(holders[0].settled for holders in self.parts)

    def choices(self) -> Iterator[tuple[Held, ...]]:
        """One holder per rank: first the best of each, then others; a bounded number."""
        # The first rank varies slowest in a product; which of them fails is not known here anyway.
        yield from itertools.islice(itertools.product(*self.parts), _MAX_CHOICES)


def whole_states(entries: Iterable[Held], *, run: str, min_step: int = 0) -> list[Whole]:
    """The states that can be put together, the newest step first.

    The parts of one state carry the same attempt: those of two tries to save one step are never mixed.
    """
    found: dict[tuple[int, str, int], dict[int, dict[str, Held]]] = {}
    for one in entries:
        if one.run == run and one.step >= min_step and 0 <= one.rank < one.world:
            ranks = found.setdefault((one.step, one.attempt, one.world), {})
            ranks.setdefault(one.rank, {}).setdefault(one.address, one)
    states = [
        Whole(step, attempt, tuple(_ordered(ranks[rank].values()) for rank in range(world)))
        for (step, attempt, world), ranks in found.items()
        if len(ranks) == world
    ]
    return sorted(states, key=lambda state: (-state.step, state.attempt))


def incomplete_steps(entries: Iterable[Held], *, run: str) -> dict[int, list[int]]:
    """The ranks whose parts nobody holds, by step; steps that are whole are left out."""
    held: dict[tuple[int, str], tuple[int, set[int]]] = {}
    for one in entries:
        if one.run == run:
            held.setdefault((one.step, one.attempt), (one.world, set()))[1].add(one.rank)
    whole = {step for (step, _), (world, ranks) in held.items() if len(ranks) >= world}
    return {
        step: sorted(set(range(world)) - ranks)
        for (step, _), (world, ranks) in sorted(held.items())
        if step not in whole
    }


def _ordered(holders: Iterable[Held]) -> tuple[Held, ...]:
    """Own states before copies, verified ones before those that are being verified."""
    return tuple(sorted(holders, key=lambda one: (not one.settled, bool(one.origin), one.address)))


def to_copy(entries: Sequence[Held]) -> list[Held]:
    """The newest own state of every rank in a catalogue: what a neighbour keeps a copy of."""
    newest: dict[tuple[str, int], Held] = {}
    for one in entries:  # in the order they were staged
        if not one.origin:
            newest[one.folder, one.rank] = one
    return list(newest.values())
