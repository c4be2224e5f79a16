"""How much of its time a run spent on steps, and how fast it came back from each loss.

Goodput is the time that the run's steps take undisturbed over the time that they took. What a step takes
undisturbed is the median over those that were done at the full size: a few slow ones do not change it. Where
it can be had, the time of an undisturbed run of the same steps is better. The time between the end of a run
and its next start is nobody's loss, and not counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from msgspec import Struct

from holdfast.journal import Record, RunEnded, RunStarted, StepDone, WorkerLost


class Recovery(Struct, frozen=True):
    """A loss and the way back. Times are seconds from the moment at which the loss was known."""

    at: float
    """When: wall time of the journal."""
    what: str
    step: int
    """The step the lost worker was in."""
    next_step_s: float | None
    """Until the next step was done; None if there was none."""
    full_size_s: float | None
    """Until a step was done at the full size again; None if that did not happen before the next loss."""


class Goodput(Struct, frozen=True):
    """The account of a run. `ratio` is None for a run of less than two steps."""

    steps: int
    actual_s: float
    """From the first step to the last, without the time in which the run was stopped."""
    undisturbed_s: float
    ratio: float | None
    recoveries: tuple[Recovery, ...]


def goodput(records: Iterable[Record]) -> Goodput:
    """The account of a run, from the records of its journal in any order."""
    ordered = sorted((one for one in records if isinstance(one.event, _KINDS)), key=_time)
    kept = [one for one in ordered if isinstance(one.event, StepDone | WorkerLost)]
    done = [(one.t, one.event) for one in kept if isinstance(one.event, StepDone)]
    first: dict[int, float] = {}
    for t, event in done:
        first.setdefault(event.step, t)
    full = max((event.replicas for _, event in done), default=0)
    usual = [event.seconds for _, event in done if event.replicas == full and event.seconds > 0]
    steps = len(first)
    begin, end = min(first.values(), default=0.0), max(first.values(), default=0.0)
    actual = end - begin - _stopped(ordered, begin, end)
    undisturbed = (steps - 1) * statistics.median(usual) if usual and steps > 1 else 0.0
    return Goodput(
        steps=steps,
        actual_s=actual,
        undisturbed_s=undisturbed,
        ratio=min(1.0, undisturbed / actual) if actual > 0 and usual else None,
        recoveries=tuple(_recoveries(kept, full)),
    )


_KINDS = StepDone | WorkerLost | RunStarted | RunEnded


def _time(record: Record) -> float:
    return record.t


def _stopped(ordered: list[Record], begin: float, end: float) -> float:
    """The seconds between two times in which there was no run: it had ended, and was started again later."""
    total, ended = 0.0, None
    for one in ordered:
        if isinstance(one.event, RunEnded):
            ended = one.t
        elif isinstance(one.event, RunStarted) and ended is not None:
            total += max(0.0, min(one.t, end) - max(ended, begin))
            ended = None
    return total


def _recoveries(kept: list[Record], full: int) -> Iterable[Recovery]:
    losses = [at for at, one in enumerate(kept) if isinstance(one.event, WorkerLost)]
    for number, at in enumerate(losses):
        lost = kept[at]
        assert isinstance(lost.event, WorkerLost)
        following = losses[number + 1] if number + 1 < len(losses) else len(kept)
        later = [(one.t, one.event) for one in kept[at:] if isinstance(one.event, StepDone)]
        before_next = [t for t, event in later if event.replicas == full and t <= kept[following - 1].t]
        yield Recovery(
            at=lost.t,
            what=f"replica {lost.event.replica} worker {lost.event.index}: {lost.event.cause}",
            step=lost.event.step,
            next_step_s=later[0][0] - lost.t if later else None,
            full_size_s=before_next[0] - lost.t if before_next else None,
        )
