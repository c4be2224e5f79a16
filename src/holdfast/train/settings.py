"""What a run does beside its steps: checkpoints, evaluation, log lines, profiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from holdfast.train.problems import Problem, at_least


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When the state is saved, and how much of it is kept."""

    every: int = 100
    """Steps between two saves; 0: only at the end, on a stop and where the batch size changes."""
    keep: int = 3
    """How many of the latest steps stay, whatever they were saved for; 0: all."""
    at_batch_change: bool = True
    """Also save before the first step with another batch size. `keep` counts that step as any other."""
    folder: str = ""
    """Where; empty: `ckpt` in the run's folder."""
    mirror: str = ""
    """A second place (`s3://bucket/run`) that saved steps are copied to in the background; empty: none."""

    def problems(self) -> list[Problem]:
        """Every mistake in these settings."""
        return at_least("checkpoint.every", self.every, 0) + at_least("checkpoint.keep", self.keep, 0)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """When the loss on held-out samples is measured, and on how many."""

    every: int = 0
    """Steps between two evaluations; 0: none."""
    samples: int = 64
    """The first so many held-out samples: always the same ones."""
    batch: int = 8
    """How many of them go through the model at once."""

    def problems(self) -> list[Problem]:
        """Every mistake in these settings."""
        found = at_least("evaluation.every", self.every, 0)
        if self.every:
            found += at_least("evaluation.samples", self.samples, 1)
            found += at_least("evaluation.batch", self.batch, 1)
            if self.batch >= 1 and self.samples % self.batch:
                better = max(1, self.samples // self.batch) * self.batch
                found.append(
                    Problem(
                        "evaluation.samples",
                        f"is {self.samples}, not a whole number of batches of {self.batch}",
                        f"evaluation.samples={better}, or change evaluation.batch",
                    )
                )
        return found


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """What is written down while the run goes on."""

    every: int = 10
    """Steps between two log lines. Metrics go to the file at every step."""
    profile_start: int = 0
    """First step of the window that `jax.profiler` records."""
    profile_steps: int = 0
    """Steps of that window; 0: no profile."""
    trackers: tuple[str, ...] = ()
    """More places that metrics go to, each `module:function` (or `file.py:function`) that returns one."""

    def problems(self) -> list[Problem]:
        """Every mistake in these settings."""
        found = at_least("log.every", self.every, 1)
        found += at_least("log.profile_start", self.profile_start, 0)
        found += at_least("log.profile_steps", self.profile_steps, 0)
        return found
