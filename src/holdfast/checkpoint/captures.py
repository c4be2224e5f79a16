"""The capturing of saves: host arrays at once, arrays on devices beside the program where that is possible.

A save that goes on after `save()` has returned reads either a snapshot, or the program's own arrays, which
the program promised not to change before `handle.fence()`. What copies from devices is the framework's
business (`Adapter.stager`); what is copied in which order, and what becomes of the save, is decided here.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, final

from holdfast import faults, journal
from holdfast.arrays import Adapter, Copying, DeviceCopy, FlatTree, Stager
from holdfast.checkpoint import saving
from holdfast.clock import Deadline
from holdfast.errors import HoldfastError, SaveError
from holdfast.format import BLOCK
from holdfast.vault import Crew, Slot

_CHUNK: Final = 32 << 20
"""The largest run of bytes that is one copy: what is done is told, and stops, in steps of this."""


class Split(NamedTuple):
    """A plan taken apart: what is copied from host memory, and what by a stager, in the order of the file."""

    host: saving.SavePlan
    device: tuple[DeviceCopy, ...]
    stager: Stager | None


def split(plan: saving.SavePlan, leaves: Sequence[Any]) -> Split:
    """The copies of a plan that a stager can do, joined to long runs, and the rest."""
    chosen: Stager | None = None
    takes: dict[int, bool] = {}
    stagers: dict[int, Stager | None] = {}
    copies: list[DeviceCopy] = []
    blocks: list[tuple[saving.StagedCopy, ...]] = []
    for block in plan.blocks:
        rest: list[saving.StagedCopy] = []
        for copy in block:
            if copy.leaf not in takes:
                stager = _stager_of(copy.adapter, stagers)
                # One framework's devices at a time: a tree of two has one of them copied at once.
                usable = stager is not None and chosen in (None, stager)
                takes[copy.leaf] = usable and stager is not None and stager.takes(leaves[copy.leaf])
                chosen = stager if takes[copy.leaf] else chosen
            # What is not one run of bytes is gathered on the host.
            if takes[copy.leaf] and not copy.move.dims:
                _add(copies, copy)
            else:
                rest.append(copy)
        blocks.append(tuple(rest))
    host = plan if not copies else dataclasses.replace(plan, blocks=tuple(blocks))
    return Split(host, tuple(copies), chosen if copies else None)


def _stager_of(adapter: Adapter, known: dict[int, Stager | None]) -> Stager | None:
    if id(adapter) not in known:
        known[id(adapter)] = adapter.stager()
    return known[id(adapter)]


def _add(copies: list[DeviceCopy], copy: saving.StagedCopy) -> None:
    one = copy.move
    if copies:
        last = copies[-1]
        follows = (last.leaf, last.ordinal) == (copy.leaf, copy.ordinal) and (
            last.source + last.nbytes == one.source and last.target + last.nbytes == one.target
        )
        if follows and last.nbytes + one.run <= _CHUNK:
            copies[-1] = last._replace(nbytes=last.nbytes + one.run)
            return
    copies.append(DeviceCopy(copy.leaf, copy.ordinal, one.source, one.target, one.run))


def filled_upto(copies: Sequence[DeviceCopy], done: int, size: int) -> int:
    """How much of the file, in whole blocks from its front, is there once the first `done` copies are."""
    return size if done >= len(copies) else copies[done].target // BLOCK * BLOCK


class Deferred(NamedTuple):
    """A capture that is not over: its copies, and how far the file is filled as they go on."""

    copying: Copying
    advance: Callable[[int], None]

    @property
    def captured(self) -> bool:
        """Whether the program may change its arrays already."""
        return self.copying.captured


@final
class Captures:
    """Captures trees into slots. Saves that go on do so one after the other, on one thread."""

    def __init__(self, copiers: int, deadline_s: float, note: Callable[[journal.Event], None]) -> None:
        self._copiers = copiers
        self._deadline_s = deadline_s
        self._note = note
        self._crew = Crew(copiers - 1, "holdfast-copy")
        self._stage: Crew | None = None
        self._split: tuple[saving.SavePlan, Split] | None = None
        self._stops: set[threading.Event] = set()
        self._changed = threading.Condition()
        self._told = 0

    def prepare(self, plan: saving.SavePlan, flat: FlatTree, slot: Slot) -> None:
        """Do beforehand what the first capture of such a tree would have to."""
        found = self._split_of(plan, flat)
        if found.stager is not None:
            try:
                found.stager.prepare(flat.leaves, found.device, slot)
            finally:
                self._announce(found.stager)

    def begin(
        self,
        plan: saving.SavePlan,
        flat: FlatTree,
        slot: Slot,
        advance: Callable[[int], None],
        *,
        stop: threading.Event,
        fenced: bool,
    ) -> Deferred | None:
        """Capture a tree; None if that is done, else what is still to be copied.

        Blocks: for one memory copy of host arrays; and of arrays on devices where the program has not
        promised to leave them alone (`fenced`) and there is no room for a snapshot of them, until `stop`.
        """
        found = self._split_of(plan, flat)
        saving.ready(found.host, flat)
        if found.stager is None:
            saving.Capture(plan, flat.leaves, slot.address, advance).run(self._crew, self._copiers - 1)
            return None
        try:
            copying = found.stager.begin(flat.leaves, found.device, slot, fenced=fenced)
        finally:
            self._announce(found.stager)
        host = saving.Capture(found.host, flat.leaves, slot.address, _nobody)
        host.run(self._crew, self._copiers - 1)

        def filled(done: int) -> None:
            faults.site("trainer.stage.device")
            advance(filled_upto(found.device, done, plan.size))

        deferred = Deferred(copying, filled)
        if fenced or copying.captured:
            return deferred
        self._run(deferred, stop)
        self._announce(found.stager)
        return None

    def go_on(
        self, deferred: Deferred, stop: threading.Event, over: Callable[[HoldfastError | None], None]
    ) -> None:
        """Copy on a thread of its own, until `stop`; `over` is called there at the end, with what failed."""
        with self._changed:
            self._stops.add(stop)
            if self._stage is None:
                self._stage = Crew(1, "holdfast-stage")
        self._stage.submit(self._go_on, deferred, stop, over)

    def _go_on(
        self, deferred: Deferred, stop: threading.Event, over: Callable[[HoldfastError | None], None]
    ) -> None:
        error: HoldfastError | None = None
        try:
            self._run(deferred, stop)
        except HoldfastError as failed:
            error = failed
        # Anything else must end the save as well: the program waits for it at its fence.
        except BaseException as failed:
            error = SaveError(f"copying from a device failed: {type(failed).__name__}: {failed}")
        try:
            if self._split is not None and self._split[1].stager is not None:
                self._announce(self._split[1].stager)
            over(error)
        finally:
            with self._changed:
                self._stops.remove(stop)
                self._changed.notify_all()

    def _run(self, deferred: Deferred, stop: threading.Event) -> None:
        deferred.copying.run(deferred.advance, stop, Deadline(self._deadline_s))

    def close(self, timeout_s: float) -> bool:
        """Cancel what is still being copied; False if it did not end in time."""
        with self._changed:
            for stop in self._stops:
                stop.set()
            ended = self._changed.wait_for(lambda: not self._stops, timeout_s)
        if self._stage is not None and ended:
            self._stage.close(timeout_s)
        self._crew.close(timeout_s)
        return ended

    def _split_of(self, plan: saving.SavePlan, flat: FlatTree) -> Split:
        if self._split is None or self._split[0] is not plan:
            self._split = (plan, split(plan, flat.leaves))
        return self._split[1]

    def _announce(self, stager: Stager) -> None:
        """Write down by which route state leaves its devices, whenever that has changed."""
        with self._changed:
            told = stager.announcements()
            for route, reason in told[self._told :]:
                self._note(journal.StagingRoute(route=route, reason=reason))
            self._told = len(told)


def _nobody(_upto: int) -> None:
    """Told once the devices' bytes are there as well."""
