"""Microbatches for a step: read ahead, cut, and put where the devices of this process want them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

import jax

from holdfast.train.batches import BatchSchedule
from holdfast.train.data import Prefetcher, Stream
from holdfast.train.step import Steps

Range = tuple[int, int]


@final
class Feed:
    """The data of one worker. It reads only the samples that its own devices work on."""

    def __init__(self, steps: Steps, stream: Stream, schedule: BatchSchedule) -> None:
        self._steps = steps
        self._schedule = schedule
        self._lanes: tuple[int, ...] = tuple(range(steps.config.batch.lanes))
        self._whole = jax.process_count() == 1
        self._bare = steps.layout.mesh.size == 1
        self._ahead = Prefetcher(stream.batch, self._ranges)

    def begin(self, step: int) -> None:
        """A step begins: what it needs, and the next one, is read from now on."""
        self._ahead.begin(step)

    def expect(self, lanes: tuple[int, ...]) -> None:
        """This worker computed these lanes; the next step's are the same unless somebody comes or goes."""
        self._lanes = lanes or self._lanes

    def lane(self, step: int, lane: int) -> Range:
        """The samples of a lane: an equal share of the batch, in the order of the lanes."""
        start, stop = self._schedule.batch_range(step)
        share = (stop - start) // self._steps.config.batch.lanes
        return start + lane * share, start + (lane + 1) * share

    def micro(self, start: int, stop: int) -> int:
        """How many samples go through the model at once, of those from `start` to `stop` - 1."""
        return self._steps.config.batch.micro or stop - start

    def micros(self, start: int, stop: int) -> Iterator[Mapping[str, Any]]:
        """Samples `start` to `stop` - 1 in microbatches. Blocks: until they are read. Fails: DataError."""
        size, keys = self.micro(start, stop), self._steps.keys
        for lo, hi in self._spans(start, stop):
            batch: Mapping[str, Any] = self._ahead.batch(lo, hi)
            pieces = range(0, hi - lo, size) if self._whole else (0,)
            for at in pieces:
                piece = {key: batch[key][at : at + size] for key in keys}
                yield piece if self._bare else self._steps.put(piece, size)

    def close(self) -> None:
        """Read nothing more."""
        self._ahead.close()

    def _ranges(self, step: int) -> Iterable[Range]:
        if not self._steps.config.batch.lanes:
            return self._spans(*self._schedule.batch_range(step))
        return [span for lane in self._lanes for span in self._spans(*self.lane(step, lane))]

    def _spans(self, start: int, stop: int) -> list[Range]:
        """What this process reads of some samples: all, or of each microbatch the rows of its devices."""
        if self._whole:
            return [(start, stop)]
        size = self.micro(start, stop)
        rows = self._steps.local_rows(size)
        return [(at + rows.start, at + rows.stop) for at in range(start, stop, size)]
