"""How a worker comes by its state: from a live replica, the memory of vaults, the disk, or its program."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, final

import msgspec

from holdfast import faults, journal
from holdfast.errors import CoordError, TransferError
from holdfast.supervise.donors import Donor
from holdfast.supervise.members import Members, Waits
from holdfast.supervise.messages import Remark
from holdfast.supervise.regroup import NO_STATE, Decision
from holdfast.supervise.saving import RunSaver

log = logging.getLogger("holdfast.run")

_VAULTS: Final = "vault/"
_RECEIVE_S: Final = 120.0
_PLACES: Final = {"vault": "in the memory of a vault", "disk": "on disk", "mirror": "on the mirror"}


class Found(NamedTuple):
    """A state, and how many steps it has seen."""

    steps: int
    state: Any


@final
class Arrival:
    """Where one worker finds state."""

    def __init__(
        self,
        saver: RunSaver,
        events: journal.Journal,
        board: Waits,
        *,
        members: Members | None,
        donor: Donor | None,
        say: Callable[[Remark], None] = lambda remark: None,
    ) -> None:
        self._saver = saver
        self._events = events
        self._board = board
        self._members = members
        self._donor = donor
        self._say = say

    def state(self, decision: Decision, template: Any, first: Callable[[], Found]) -> Found | None:
        """What a decision gives this worker; None if that is nothing, or could not be had.

        Blocks: until it is here. Fails: GenerationOver, for all workers of the replica alike; MismatchError.
        """
        assert self._members is not None
        slot = self._members.place.slot
        try:
            if slot in decision.loaders:
                return self.loaded(template, first)
            if slot in decision.sources:
                return self._received(self._members, decision, template)
        except TransferError as error:
            log.info("no state yet: %s", error.message)
        return None

    def tell_of_vault(self, node: int) -> None:
        """Say where this node's vault is: whoever comes after a loss of all finds what is staged there."""
        address = self._saver.vault_address()
        if address and self._members is not None:
            with contextlib.suppress(CoordError):  # then the vaults of other nodes are not asked
                self._members.client.set(f"{_VAULTS}{node}", address.encode())

    def loaded(self, template: Any, first: Callable[[], Found]) -> Found:
        """The newest state in vaults and on disk, in the shape of `template`; else what `first` makes.

        Called by: all workers of a replica. Blocks: while reading. Fails: GenerationOver, MismatchError.
        """
        began = time.monotonic()
        vaults = self._vaults()
        found = self._saver.load(template, vaults=vaults)
        newest = NO_STATE if found is None else found.steps
        common = self._common(newest)
        if common == NO_STATE:
            found = None
        elif common != newest:
            found = self._saver.load(template, step=common, vaults=vaults)
        source = "init" if found is None else found.source
        state = first() if found is None else Found(found.steps, found.state)
        self._events.append(
            journal.RunRestored(step=state.steps, source=source, seconds=time.monotonic() - began)
        )
        if found is not None:
            self._say(Remark(f"the run goes on from step {state.steps}, {_PLACES.get(source, source)}"))
        return state

    def _vaults(self) -> list[str]:
        if self._members is not None:
            with contextlib.suppress(CoordError):
                return [one.decode() for one in self._members.client.scan(_VAULTS).values()]
        return []

    def _common(self, newest: int) -> int:
        """The step that all workers of this replica can load.

        Whoever looked a moment later may have found a newer one: all take the oldest of the newest.
        """
        note = msgspec.msgpack.encode(newest)
        met = None if self._members is None else self._members.row_vote("load", note=note)
        return newest if met is None else min(msgspec.msgpack.decode(one, type=int) for _, one in met.notes)

    def _received(self, members: Members, decision: Decision, template: Any) -> Found:
        donors = decision.sources[members.place.slot]
        assert self._donor is not None
        self._board.waiting("state")
        try:
            got = self._donor.receive(
                [members.reports[slot].transfer for slot in donors],
                members.meeting,
                template,
                rank=members.place.seat.index,
                world=members.place.workers,
                timeout_s=_RECEIVE_S,
            )
        finally:
            self._board.waiting(None)
        faults.site("run.received")
        event = journal.StateReceived(step=got.steps, bytes=got.nbytes, seconds=got.seconds, source=donors[0])
        self._events.append(event)
        return Found(got.steps, got.state)
