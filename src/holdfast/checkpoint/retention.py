"""Which steps to keep, as pure functions of the listing.

    keep = latest(3) | every(1_000) | best(2, "loss")

A policy is asked with all committed steps, ascending, and answers with those it wants kept. Policies join
with `|`: a step stays if any of them wants it. Pinned steps and the newest step always stay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from holdfast.checkpoint.steps import StepInfo
from holdfast.errors import UsageError


class Policy(ABC):
    """Decides which steps stay. Pure: the time comes in as an argument."""

    @abstractmethod
    def kept(self, steps: Sequence[StepInfo], *, now: float) -> frozenset[int]:
        """The steps to keep, out of `steps` in ascending order; `now` in seconds since 1970."""

    def __or__(self, other: Policy) -> Policy:
        return Union((*_parts(self), *_parts(other)))


@final
@dataclass(frozen=True, slots=True)
class Union(Policy):
    """Keeps what any of its policies keeps."""

    policies: tuple[Policy, ...]

    def kept(self, steps: Sequence[StepInfo], *, now: float) -> frozenset[int]:
        return frozenset().union(*(policy.kept(steps, now=now) for policy in self.policies))


@final
@dataclass(frozen=True, slots=True)
class Latest(Policy):
    """Keeps the newest `count` steps."""

    count: int

    def kept(self, steps: Sequence[StepInfo], *, now: float) -> frozenset[int]:
        return frozenset(info.step for info in steps[-self.count :])


@final
@dataclass(frozen=True, slots=True)
class Everything(Policy):
    """Keeps every step."""

    def kept(self, steps: Sequence[StepInfo], *, now: float) -> frozenset[int]:
        return frozenset(info.step for info in steps)


@final
@dataclass(frozen=True, slots=True)
class Every(Policy):
    """Keeps the first step at or after each multiple of `interval` (in steps or samples)."""

    interval: int
    samples: bool = False

    def kept(self, steps: Sequence[StepInfo], *, now: float) -> frozenset[int]:
        # Runs whose batch size changes do not hit the multiples exactly, hence "at or after". Only what is
        # listed decides, so that a step kept once is kept again after others are gone.
        kept: set[int] = set()
        reached = 0
        for info in steps:
            progress = info.samples if self.samples else info.step
            if progress is None:
                continue
            multiple = progress // self.interval
            if multiple > reached or progress == 0:
                kept.add(info.step)
            reached = max(reached, multiple)
        return frozenset(kept)


@final
@dataclass(frozen=True, slots=True)
class Best(Policy):
    """Keeps the `count` steps with the lowest (or highest) value of a metric in their metadata."""

    count: int
    metric: str
    highest: bool = False

    def kept(self, steps: Sequence[StepInfo], *, now: float) -> frozenset[int]:
        scored = [(info.metric(self.metric), info.step) for info in steps]
        sign = -1.0 if self.highest else 1.0
        # Among equals the newer step is the better one.
        ranked = sorted((sign * value, -step) for value, step in scored if value is not None)
        return frozenset(-step for _, step in ranked[: self.count])


@final
@dataclass(frozen=True, slots=True)
class Within(Policy):
    """Keeps steps younger than `seconds`; with `spacing_s`, only one in each such stretch of time."""

    seconds: float
    spacing_s: float = 0.0

    def kept(self, steps: Sequence[StepInfo], *, now: float) -> frozenset[int]:
        kept: set[int] = set()
        last: float | None = None
        for info in steps:
            young = now - info.created <= self.seconds
            if young and (last is None or info.created - last >= self.spacing_s):
                kept.add(info.step)
                last = info.created
        return frozenset(kept)


def latest(count: int) -> Policy:
    """Keep the newest `count` steps."""
    return Latest(_positive("latest", count))


def every(interval: int, *, unit: str = "steps") -> Policy:
    """Keep a step at or after each multiple of `interval`, counted in "steps" or "samples"."""
    if unit not in ("steps", "samples"):
        raise UsageError(f"unit {unit!r} is unknown", hint="use 'steps' or 'samples'")
    return Every(_positive("every", interval), samples=unit == "samples")


def best(count: int, metric: str, *, highest: bool = False) -> Policy:
    """Keep the `count` best steps by a metric given as `meta={"metrics": {metric: value}}`."""
    return Best(_positive("best", count), metric, highest)


def within(seconds: float, *, spacing_s: float = 0.0) -> Policy:
    """Keep steps younger than `seconds`, at most one per `spacing_s`."""
    if seconds <= 0 or spacing_s < 0:
        raise UsageError(f"within({seconds}, spacing_s={spacing_s}) keeps nothing")
    return Within(seconds, spacing_s)


def everything() -> Policy:
    """Keep every step."""
    return Everything()


def policy(keep: int | Policy | None) -> Policy:
    """The policy that a `keep=` means: a number is `latest`, None is `everything`."""
    if keep is None:
        return everything()
    return keep if isinstance(keep, Policy) else latest(keep)


def doomed(steps: Sequence[StepInfo], policy: Policy, *, now: float) -> list[int]:
    """The steps to remove, oldest first. Never the newest, never a pinned one."""
    ordered = sorted(steps, key=lambda info: info.step)
    kept = policy.kept(ordered, now=now) | {info.step for info in ordered if info.pinned}
    return [info.step for info in ordered[:-1] if info.step not in kept]


def _positive(what: str, value: int) -> int:
    if type(value) is not int or value < 1:
        raise UsageError(f"{what}({value!r}): a positive whole number is needed")
    return value


def _parts(policy: Policy) -> tuple[Policy, ...]:
    return policy.policies if isinstance(policy, Union) else (policy,)
