"""The global batch as a pure function of the samples consumed, with closed forms both ways.

The syntax is that of Megatron's `--step-batch-size-schedule`: `0:768 250B:1536 500B:3072`. Unlike there,
sizes may also fall, every entry is checked before the run starts, and the schedule can be inverted.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple, final

from holdfast.errors import UsageError
from holdfast.train.problems import Problem, at_least, one_of
from holdfast.train.quantities import parse_count

UNITS: Final = ("tokens", "samples")
_SETTING: Final = "batch.schedule"


class Phase(NamedTuple):
    """A stretch of steps with one batch size."""

    step: int
    """The first of them."""
    start: int
    """Samples consumed before it."""
    size: int
    """Samples in each batch."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """How many samples go into a step, and in which pieces."""

    schedule: str = "64"
    """Samples in a global batch: `64`, or `0:768 250B:1536`, each size with the point it starts from."""
    unit: str = "tokens"
    """What the points count: tokens or samples."""
    lanes: int = 8
    """Fixed shares of a batch, summed in a fixed order whoever computes them: a run's bits do not depend on
    the number of replicas. 0: one world, where XLA sums."""
    micro: int = 1
    """Samples of a lane that go through the model at once. Without lanes: of the whole batch (0: all)."""

    def build(self, seq_len: int) -> BatchSchedule:
        """The schedule. Fails: UsageError."""
        return BatchSchedule.parse(self.schedule, seq_len, self.unit)

    def problems(self, seq_len: int) -> list[Problem]:
        """Every mistake in these settings: syntax, order, and sizes that the pieces do not divide."""
        found = one_of("batch.unit", self.unit, UNITS)
        found += at_least("batch.lanes", self.lanes, 0)
        found += at_least("batch.micro", self.micro, 1 if self.lanes else 0)
        if found:
            return found
        entries, found = _read(self.schedule, seq_len, self.unit)
        return found or [problem for _, size in entries for problem in self._undivided(size)]

    def microbatches(self, size: int) -> int:
        """How often the model runs for a global batch of `size`, in each lane or in the one world."""
        share = size // self.lanes if self.lanes else size
        return share // self.micro if self.micro else 1

    def is_fused(self, size: int) -> bool:
        """Whether a step with a batch of `size` is one program: no lanes, and one microbatch."""
        return not self.lanes and self.microbatches(size) == 1

    def _undivided(self, size: int) -> list[Problem]:
        pieces = max(self.lanes, 1) * max(self.micro, 1)
        if size % pieces == 0:
            return []
        lower, upper = size // pieces * pieces, -(-size // pieces) * pieces
        made = f"{self.lanes} lanes of {self.micro}" if self.lanes else f"microbatches of {self.micro}"
        sizes = f"{lower} or {upper}" if lower else f"{upper}"
        other = [f"use {sizes}"]
        if self.lanes and size % self.lanes == 0:
            other.append(f"batch.micro={_divisors(size // self.lanes, self.micro)}")
        elif self.lanes and size % self.micro == 0:
            other.append(f"batch.lanes={_divisors(size // self.micro, self.lanes)}")
        elif not self.lanes:
            other.append(f"batch.micro={_divisors(size, self.micro)}")
        message = f"has a batch of {size}, which {made} (a multiple of {pieces}) cannot make up"
        return [Problem(_SETTING, message, " or ".join(other))]


@final
@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """Which samples each step takes. Everything is computed from the phases; nothing is counted or stored.

    A size holds from the first step that starts at or after its point, as in Megatron, so the switch comes
    less than one batch late. It describes the run from its first sample on: to change the size of a run that
    is under way, add an entry and leave those of the past.
    """

    phases: tuple[Phase, ...]

    @staticmethod
    def parse(text: str, seq_len: int, unit: str = "tokens") -> BatchSchedule:
        """The schedule that `text` describes. Fails: UsageError, which says what would be right."""
        return _parse(text, seq_len, unit)

    def size_at(self, samples: int) -> int:
        """The size of the batch that the sample with this index belongs to."""
        return self._phase_of(samples).size

    def step_at(self, samples: int) -> int:
        """The step that takes the sample with this index: the next step once `samples` are consumed."""
        phase = self._phase_of(samples)
        return phase.step + (samples - phase.start) // phase.size

    def samples_at(self, step: int) -> int:
        """How many samples are consumed before `step`: the inverse of `step_at` on the starts of batches."""
        if step < 0:
            raise UsageError(f"there is no step {step}", hint="steps count from 0")
        index = bisect_right(self.phases, step, key=lambda phase: phase.step) - 1
        phase = self.phases[index]
        return phase.start + (step - phase.step) * phase.size

    def batch_range(self, step: int) -> tuple[int, int]:
        """The samples of `step`: the first, and the one after the last."""
        start = self.samples_at(step)
        return start, start + self.size_at(start)

    def total_steps(self, samples: int) -> int:
        """How many steps consume at least so many samples; the last one may go beyond."""
        return self.step_at(samples - 1) + 1 if samples > 0 else 0

    def changes(self) -> tuple[Phase, ...]:
        """The phases after the first: where the size changes."""
        return self.phases[1:]

    def check(self, samples: int) -> None:
        """Nothing, if a batch starts after so many samples. Fails: UsageError; a run cannot go on there."""
        start = self.samples_at(self.step_at(samples))
        if start == samples:
            return
        raise UsageError(
            f"{samples} samples are consumed, which is inside a batch of {self.size_at(samples)} that starts "
            f"at {start}: the run had another batch schedule until here",
            hint="a schedule covers the whole run: keep the entries of the past and add new ones",
        )

    def _phase_of(self, samples: int) -> Phase:
        if samples < 0:
            raise UsageError(f"there is no sample {samples}", hint="samples count from 0")
        return self.phases[bisect_right(self.phases, samples, key=lambda phase: phase.start) - 1]


@lru_cache(maxsize=64)
def _parse(text: str, seq_len: int, unit: str) -> BatchSchedule:
    problems = one_of("batch.unit", unit, UNITS)
    entries: list[tuple[int, int]] = []
    if not problems:
        entries, problems = _read(text, seq_len, unit)
    if problems:
        raise UsageError("; ".join(f"{p.setting} {p.message}" for p in problems), hint=problems[0].hint)
    return BatchSchedule(_phases(entries))


def _phases(entries: list[tuple[int, int]]) -> tuple[Phase, ...]:
    """Where each size really starts: the first step boundary at or after its point."""
    phases = [Phase(0, 0, entries[0][1])]
    for point, size in entries[1:]:
        last = phases[-1]
        steps = max(0, -(-(point - last.start) // last.size))
        if steps == 0 or size == last.size:
            # No change, or overtaken: a batch of the size before it reached past its point and this one.
            phases[-1] = last._replace(size=size)
            if len(phases) > 1 and phases[-2].size == size:
                phases.pop()
        else:
            phases.append(Phase(last.step + steps, last.start + steps * last.size, size))
    return tuple(phases)


def _read(text: str, seq_len: int, unit: str) -> tuple[list[tuple[int, int]], list[Problem]]:
    """Points in samples with their sizes, as written; and all that is wrong with them."""
    found: list[Problem] = []
    words = [word for word in re.split(r"[\s,]+", text) if word]
    if not words:
        return [], [Problem(_SETTING, "is empty", "write a size, as 64, or points with sizes: 0:64 1B:128")]
    if len(words) == 1 and ":" not in words[0]:
        words = [f"0:{words[0]}"]
    entries: list[tuple[int, int]] = []
    for word in words:
        entry = _entry(word, found)
        if entry is not None:
            entries.append(entry)
    if not found:
        entries = [
            (point // seq_len if unit == "tokens" and seq_len > 0 else point, size) for point, size in entries
        ]
        found += _disorder(words, entries)
    return entries, found


def _entry(word: str, found: list[Problem]) -> tuple[int, int] | None:
    point, colon, size = word.partition(":")
    if not colon:
        hint = f"write POINT:SIZE, as 0:{word} or 250B:{word}"
        found.append(Problem(_SETTING, f"has an entry {word!r} without a point", hint))
        return None
    try:
        entry = parse_count(point), parse_count(size)
    except UsageError as error:
        found.append(Problem(_SETTING, f"has an entry {word!r}: {error.message}", error.hint or ""))
        return None
    if entry[1] < 1:
        found.append(
            Problem(_SETTING, f"has an entry {word!r} with an empty batch", "a batch is 1 sample or more")
        )
        return None
    return entry


def _disorder(words: list[str], entries: list[tuple[int, int]]) -> list[Problem]:
    points = [point for point, _ in entries]
    if sorted(points) != points:
        ordered = " ".join(word for _, word in sorted(zip(points, words, strict=True)))
        return [Problem(_SETTING, "is not in the order of its points", f"did you mean {ordered!r}?")]
    found = [
        Problem(
            _SETTING,
            f"has two sizes from sample {before} on",
            "points must be a sequence length apart or more",
        )
        for before, after in pairwise(points)
        if before == after
    ]
    if points[0] != 0:
        found.append(Problem(_SETTING, f"starts at {words[0]!r}", f"the first point is 0: 0:{entries[0][1]}"))
    return found


def _divisors(number: int, near: int) -> str:
    """The divisors of `number` around `near`, for a message."""
    some = [value for value in range(1, min(number, 4096) + 1) if number % value == 0]
    index = bisect_right(some, near)
    return ", ".join(str(value) for value in some[max(0, index - 2) : index + 2])
