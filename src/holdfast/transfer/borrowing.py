"""A run that copies out of the peers' own memory, which they lend, array by array, onto devices.

Where both ends are on one node and what is published lies in shared memory, nothing has to come: each peer
lends its memory for reading, and our threads copy what the plan wants into a little memory of a framework,
from where it goes to a device (`Landing`). No buffer for all of it is needed, and nobody writes ours.

    peers lend -> threads copy spans, in order -> arrays that are whole are placed -> peers confirm

A peer that revokes its version does not wait for us: what it lent may change while we read. So the last word
is its own. It is asked when all is copied, and only if it had not revoked by then is the run a success; what
was read is what was published. Nothing is hashed: the bytes cross no boundary on which they could be damaged.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from holdfast import faults
from holdfast.arrays import Adapter, Bytes1D, Landing, Placement
from holdfast.arrays import dtype as dtype_of
from holdfast.errors import StalledError, TransferError
from holdfast.transfer.chunks import Copies
from holdfast.transfer.legs import PeerRoute
from holdfast.transfer.manifest import Manifest
from holdfast.transfer.messages import Loan
from holdfast.transfer.patience import Patience
from holdfast.transfer.route import gather

if TYPE_CHECKING:
    from holdfast.transfer.plan import Batch, TransferPlan

_SPAN: Final = 8 << 20
"""What a thread copies at once."""
_THREADS: Final = max(2, min(8, (os.cpu_count() or 2) // 2))
_AHEAD: Final = 256 << 20
"""Bytes of arrays that are whole and not placed yet: beyond that, threads wait for whoever places."""
_LOOK_S: Final = 0.1
_STUCK_S: Final = 30.0


@final
class _Box:
    """The memory of one box of one array, taken when its first bytes come."""

    def __init__(self, array: _Array, number: int, start: int, stop: int) -> None:
        self.array = array
        self.number = number
        self.start = start
        self.nbytes = stop - start
        self.missing = 0
        """Copies that are still to be made into it."""
        self.data: Bytes1D | None = None
        self.lock = threading.Lock()

    def memory(self, landing: Landing | None) -> Bytes1D:
        """Its memory. Blocks: as `Landing.take` does."""
        with self.lock:
            if self.data is None:
                self.data = np.empty(self.nbytes, np.uint8) if landing is None else landing.take(self.nbytes)
            return self.data


@final
class _Array:
    """An array to be made: its place in the tree, and its boxes that are not whole yet."""

    def __init__(self, at: int, sink: Any, cast_from: str | None, by: _Framework) -> None:
        self.at = at
        self.sink = sink
        self.cast_from = cast_from
        self.by = by
        self.boxes: list[_Box] = []
        self.missing = 0

    @property
    def nbytes(self) -> int:
        return sum(box.nbytes for box in self.boxes)

    def placement(self) -> Placement:
        """Its bytes, in the dtype of its sink; what is cast is a copy, whose memory is its own."""
        boxes = {box.number: box.memory(self.by.landing) for box in self.boxes}
        if self.cast_from is not None:
            boxes = cast(boxes, self.cast_from, self.sink.description.layout.dtype)
        return Placement(self.sink, boxes, True)


@final
class _Framework:
    """What makes some of the arrays: an adapter, with a landing or without, or none, for slices."""

    def __init__(self, adapter: Adapter | None, landing: Landing | None) -> None:
        self.adapter = adapter
        self.landing = landing

    def made(self, arrays: Sequence[_Array]) -> list[Any]:
        batch = [one.placement() for one in arrays]
        if self.adapter is None:
            return [one.sink.placed(one.boxes) for one in batch]
        return self.adapter.place(batch) if self.landing is None else self.landing.place(batch)


def cast(boxes: dict[int, Bytes1D], stored: str, wanted: str) -> dict[int, Bytes1D]:
    """The bytes of the boxes in another dtype."""
    old, new = dtype_of(stored).numpy, dtype_of(wanted).numpy
    return {box: data.view(old).astype(new).view(np.uint8) for box, data in boxes.items()}


def landings(batches: Sequence[Batch]) -> list[Landing | None]:
    """For the arrays of each framework, where they land on their way to devices; None for those that stay."""
    return [
        None if adapter is None else adapter.landing([sink for sink, _, _ in sinks])
        for adapter, _, sinks in batches
    ]


@final
class Source:
    """A peer's memory and what is copied out of it."""

    def __init__(self, route: PeerRoute, manifest: Manifest, loan: Loan, memory: Bytes1D) -> None:
        places: dict[tuple[int, int], int] = {}
        ends: list[int] = []
        for array, info in enumerate(manifest.arrays):
            for box, extents in enumerate(info.boxes):
                size = dtype_of(info.dtype).itemsize * math.prod(hi - lo for lo, hi in extents)
                ends.append(memory.size - size)
                places[array, box] = len(places)
        if len(ends) != len(loan.offsets) or not all(map(_within, loan.offsets, ends)):
            raise TransferError(
                f"{route.peer}: {len(ends)} slices were to be lent; {len(loan.offsets)} were, or they do not "
                f"lie within the {memory.size:,} bytes that came"
            )
        stream = gather(route.route.segments, places, route.stream.chunk_bytes)
        self.copies = Copies(stream, route.stream, _SPAN)
        self.memory = memory
        self.offsets = loan.offsets


def _within(offset: int, last: int) -> bool:
    return 0 <= offset <= last


@final
class Intake:
    """Copies what was lent and makes the arrays of a plan of it. Its threads end with its context."""

    def __init__(self, plan: TransferPlan, landings: Sequence[Landing | None], sources: list[Source]) -> None:
        self._sources = sources
        self._arrays: list[_Array] = []
        self._boxes: list[_Box] = []
        for (adapter, at, sinks), landing in zip(plan.batches, landings, strict=True):
            landed, kept = _Framework(adapter, landing), _Framework(adapter, None)
            for leaf, (sink, extents, cast_from) in zip(at, sinks, strict=True):
                array = _Array(leaf, sink, cast_from, landed if cast_from is None else kept)
                array.boxes = [_Box(array, *extent) for extent in extents]
                array.missing = len(array.boxes)
                self._arrays.append(array)
                self._boxes += array.boxes
        self._boxes.sort(key=lambda box: (box.start, box.nbytes))
        self._starts = [box.start for box in self._boxes]
        self._spans = deque((source, span) for source in sources for span in range(len(source.copies)))
        self._whole: queue.SimpleQueue[_Array | BaseException | None] = queue.SimpleQueue()
        self._lock = threading.Condition()
        self._running = 0
        self._stop = False
        self._unplaced = 0
        self.done_bytes = 0

    def run(self, plan: TransferPlan, leaves: list[Any], patience: Patience) -> None:
        """Fill in the leaves. Blocks: until all is copied and given to the devices.

        Fails: StalledError at the deadline; TransferCancelled; what a framework fails with.
        """
        for source, span in self._spans:
            for _, move in source.copies[span]:
                self._box(move.target).missing += 1
        self._place(self._untouched(), leaves)
        running = min(_THREADS, len(self._spans))
        for _ in range(running):
            with self._lock:
                self._running += 1
            if not plan.host.workers.submit(self._work):
                with self._lock:
                    self._running -= 1
                raise TransferError("the endpoint is closed")
        while running:
            self._check(plan, patience)
            with contextlib.suppress(queue.Empty):
                found = [self._whole.get(timeout=min(_LOOK_S, max(0.0, patience.remaining()) + 0.001))]
                while not self._whole.empty():
                    found.append(self._whole.get_nowait())
                running -= sum(one is None for one in found)
                for one in found:
                    if isinstance(one, BaseException):
                        raise one
                self._place([one for one in found if isinstance(one, _Array)], leaves)
        self._check(plan, patience)
        if any(array.missing for array in self._arrays):
            raise TransferError("not all that the plan wants was copied")

    def _check(self, plan: TransferPlan, patience: Patience) -> None:
        patience.check(f"{self.done_bytes:,} of {plan.nbytes:,} bytes so far")
        if patience.expired():
            raise StalledError(
                f"{self.done_bytes:,} of {plan.nbytes:,} bytes copied within "
                f"deadline_s={patience.timeout_s:g}",
                hint="give it a longer deadline_s, or find out what is slow",
            )

    def _untouched(self) -> list[_Array]:
        """Arrays of which nothing is copied: they are empty."""
        found = []
        for array in self._arrays:
            array.missing -= sum(not box.missing for box in array.boxes)
            if not array.missing:
                found.append(array)
        return found

    def _place(self, arrays: Sequence[_Array], leaves: list[Any]) -> None:
        for by in {id(one.by): one.by for one in arrays}.values():
            mine = [one for one in arrays if one.by is by]
            for array, leaf in zip(mine, by.made(mine), strict=True):
                leaves[array.at] = leaf
                for box in array.boxes:
                    box.data = None  # the array's own now
        with self._lock:
            self._unplaced -= sum(one.nbytes for one in arrays)
            self._lock.notify_all()

    def _box(self, offset: int) -> _Box:
        return self._boxes[bisect_right(self._starts, offset) - 1]

    def _work(self) -> None:
        end: BaseException | None = None
        try:
            while (taken := self._next()) is not None:
                self._copy(*taken)
        # Whatever ends a thread must reach the run, which waits for it.
        except BaseException as error:
            end = error
        finally:
            self._whole.put(end)
            with self._lock:
                self._running -= 1
                self._lock.notify_all()

    def _next(self) -> tuple[Source, int] | None:
        """What to copy next, once not too much is waiting to be placed; None if there is nothing left."""
        with self._lock:
            # Whoever places waits for no thread.
            self._lock.wait_for(lambda: self._unplaced <= _AHEAD or self._stop, _STUCK_S)
            return self._spans.popleft() if self._spans and not self._stop else None

    def _copy(self, source: Source, span: int) -> None:
        for place, move in source.copies[span]:
            box = self._box(move.target)
            data = box.memory(box.array.by.landing)
            move.shifted(source.offsets[place], -box.start).apply(source.memory, data)
            del data
            whole = False
            with self._lock:
                self.done_bytes += move.nbytes
                box.missing -= 1
                if not box.missing:
                    box.array.missing -= 1
                    whole = not box.array.missing
                    self._unplaced += box.array.nbytes if whole else 0
            if whole:
                self._whole.put(box.array)
        faults.site("transfer.chunk.received")

    def __enter__(self) -> Intake:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._lock:
            self._stop = True
            self._spans.clear()
            self._lock.notify_all()
            if not self._lock.wait_for(lambda: self._running <= 0, _STUCK_S):
                raise TransferError(f"threads that copy did not end within {_STUCK_S:g} s") from error
        self._sources.clear()  # arrays and boxes refer to each other, and must not keep what was lent
