"""Learning rate and weight decay as pure functions of the samples consumed.

The formulas are those of megatron-core's OptimizerParamScheduler, evaluated in the same order of operations,
so that values agree to the last bit. Nothing is restored from a checkpoint: a changed setting simply holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, final

from holdfast.train.problems import Problem, at_least, one_of

Curve = Callable[[float], float]
"""From the share of a decay that is over, 0 to 1, to the share of the rate that is left, 1 to 0."""

CURVES: Final[Mapping[str, Curve]] = MappingProxyType(
    {
        "linear": lambda ratio: 1.0 - ratio,
        "cosine": lambda ratio: 0.5 * (math.cos(math.pi * ratio) + 1.0),
        "exponential": lambda ratio: 2.0 * math.pow(0.5, ratio) - 1.0,
        "minus_sqrt": lambda ratio: 1.0 - math.sqrt(ratio),
    }
)
SHAPES: Final = ("constant", "linear", "cosine", "inverse_sqrt", "wsd")
RAMPS: Final = ("linear", "cosine")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RateConfig:
    """The learning rate over the run; lengths are in samples, or with a suffix: 200K, 1.5M."""

    peak: float
    """The highest rate, reached at the end of the warm-up."""
    floor: float = 0.0
    """The lowest rate after the warm-up."""
    start: float = 0.0
    """The rate of the very first step, if there is a warm-up."""
    warmup: int = 0
    """Samples until the peak, in a straight line."""
    decay: int = 0
    """Samples until the floor, the warm-up included; 0: those of the whole run."""
    shape: str = "cosine"
    """How it falls: constant, linear, cosine, inverse_sqrt, or wsd (warm-up, stable, decay)."""
    wsd_decay: int = 0
    """The last so many samples of `decay` are those in which `wsd` falls."""
    wsd_shape: str = "minus_sqrt"
    """How `wsd` falls then: linear, cosine, exponential or minus_sqrt."""
    wd_start: float = 0.0
    """Weight decay at the first sample, where `wd_ramp` is not 0."""
    wd_ramp: int = 0
    """Samples until the weight decay is that of the optimizer; 0: from the start."""
    wd_shape: str = "linear"
    """How it gets there: linear or cosine."""

    def at(self, samples: int, end: int) -> float:
        """The learning rate of the step that starts after `samples`, in a run of `end` samples."""
        if self.warmup > 0 and samples <= self.warmup:
            return self.start + (self.peak - self.start) * float(samples) / float(self.warmup)
        if self.shape == "constant":
            return self.peak
        last = self.decay or end
        if samples > last:
            return self.floor
        if self.shape == "inverse_sqrt":
            rate: float = self.peak * max(self.warmup, 1) ** 0.5 / max(samples, 1) ** 0.5
            return max(self.floor, rate)
        return self.floor + self._left(samples, last) * (self.peak - self.floor)

    def weight_decay_at(self, samples: int, target: float) -> float:
        """The weight decay of that step, where the optimizer's own is `target`."""
        if samples > self.wd_ramp or self.wd_ramp == 0:
            return target
        ratio = float(samples) / float(self.wd_ramp)
        share = ratio if self.wd_shape == "linear" else CURVES["cosine"](1 - ratio)
        return self.wd_start + share * (target - self.wd_start)

    def _left(self, samples: int, last: int) -> float:
        if self.shape != "wsd":
            return CURVES[self.shape](float(samples - self.warmup) / float(last - self.warmup))
        stable = last - self.wsd_decay
        if samples <= stable:
            return 1.0
        return CURVES[self.wsd_shape](float(samples - stable) / float(self.wsd_decay))

    def problems(self, end: int, target: float) -> list[Problem]:
        """Every mistake in these settings, for a run of `end` samples and a weight decay of `target`."""
        found = one_of("rate.shape", self.shape, SHAPES)
        found += one_of("rate.wsd_shape", self.wsd_shape, CURVES)
        found += one_of("rate.wd_shape", self.wd_shape, RAMPS)
        for name in ("floor", "start", "warmup", "decay", "wsd_decay", "wd_start", "wd_ramp"):
            found += at_least(f"rate.{name}", getattr(self, name), 0)
        if not (self.peak > 0 and math.isfinite(self.peak)):
            found.append(Problem("rate.peak", f"is {self.peak}", "a learning rate is more than 0, as 3e-4"))
        for name in ("floor", "start"):
            if 0 < self.peak < getattr(self, name):
                message = f"is {getattr(self, name)}, more than the peak of {self.peak}"
                found.append(Problem(f"rate.{name}", message, f"lower it, or raise rate.peak={self.peak}"))
        if self.wd_ramp and self.wd_start > target:
            message = f"is {self.wd_start}, more than optimizer.weight_decay={target}"
            found.append(Problem("rate.wd_start", message, "a ramp of the weight decay rises"))
        return found + self._lengths(end)

    def _lengths(self, end: int) -> list[Problem]:
        if self.shape == "constant":
            return []
        found = []
        last = self.decay or end
        whole = f"rate.decay={self.decay}" if self.decay else f"the run of {end}"
        if self.warmup >= last:
            message = f"is {self.warmup} samples and {whole} samples: nothing is left to decay in"
            found.append(
                Problem("rate.warmup", message, f"less than {last}, or a longer rate.decay or samples")
            )
        if self.shape == "inverse_sqrt" and self.warmup == 0:
            message = (
                "is 0, and inverse_sqrt falls from the end of the warm-up: the rate would be next to nothing"
            )
            found.append(Problem("rate.warmup", message, "give it some samples, as 10K"))
        if self.shape == "wsd" and not 0 < self.wsd_decay <= last - self.warmup:
            message = f"is {self.wsd_decay} samples"
            room = max(last - self.warmup, 0)
            hint = f"for shape=wsd, 1 to {room}: what the warm-up leaves of {whole}"
            found.append(Problem("rate.wsd_decay", message, hint))
        return found
