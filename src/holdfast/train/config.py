"""A run as one value: the root of all settings, which knows its mistakes and its hash."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import msgspec
import xxhash

from holdfast.errors import UsageError
from holdfast.train.batches import BatchConfig, BatchSchedule
from holdfast.train.data.config import DataConfig
from holdfast.train.mesh import MeshConfig
from holdfast.train.model.config import ModelConfig
from holdfast.train.optimizer import OptimizerConfig
from holdfast.train.overrides import from_mapping, override
from holdfast.train.parameters import parameters, split_of
from holdfast.train.problems import Problem, at_least, refuse
from holdfast.train.rates import RateConfig
from holdfast.train.settings import CheckpointConfig, EvaluationConfig, LogConfig
from holdfast.train.trackers import tracker_problems


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Everything that decides what a run computes. A recipe is a function that returns one.

    The samples consumed are the only clock: batch size, learning rate, weight decay and data order are
    functions of this value and of that number.
    """

    name: str
    """What the run is called, unless the command line says otherwise."""
    seed: int = 0
    """Of the first parameters and of the order of the data."""
    seq_len: int
    """Tokens in a sample."""
    samples: int
    """The run ends after the step that consumes the last of them."""
    model: ModelConfig
    data: DataConfig
    batch: BatchConfig = field(default_factory=BatchConfig)
    rate: RateConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    log: LogConfig = field(default_factory=LogConfig)
    deterministic: bool = True
    """Only kernels that give the same bits every time."""
    check_every: int = 0
    """Steps between two comparisons of the parameters across replicas; 0: none."""

    @property
    def batches(self) -> BatchSchedule:
        """Which samples each step takes. Fails: UsageError."""
        return self.batch.build(self.seq_len)

    @property
    def total_steps(self) -> int:
        """How many steps the whole run has."""
        return self.batches.total_steps(self.samples)

    def learning_rate(self, samples: int) -> float:
        """Of the step that starts after `samples`."""
        return self.rate.at(samples, self.samples)

    def weight_decay(self, samples: int) -> float:
        """Of the step that starts after `samples`."""
        return self.rate.weight_decay_at(samples, self.optimizer.weight_decay)

    @property
    def digest(self) -> str:
        """A hash of all settings: the same for the same run, on every machine."""
        return xxhash.xxh3_128_hexdigest(self._canonical())

    def to_json(self) -> str:
        """The settings, indented for people; `from_json` reads them back."""
        return msgspec.json.format(self._canonical(), indent=2).decode() + "\n"

    @staticmethod
    def from_json(text: str | bytes) -> TrainConfig:
        """The config that `to_json` wrote. Fails: ConfigError; UsageError, if it is no JSON object."""
        try:
            values = msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise UsageError(f"this is no config: {error}", hint="it is the config.json of a run") from error
        return from_mapping(TrainConfig, values)

    def override(self, assignments: Iterable[str]) -> TrainConfig:
        """This config with each `path=value` in place. Fails: ConfigError."""
        return override(self, assignments)

    def problems(self) -> list[Problem]:
        """Every mistake, inside of one part and between them. Looks for files and modules alone."""
        found = at_least("samples", self.samples, 1)
        for name in ("seed", "check_every"):
            found += at_least(name, getattr(self, name), 0)
        found += self.model.problems() + self._dtype_problems()
        found += self.data.problems(self.seq_len)
        found += self.batch.problems(self.seq_len)
        found += self.rate.problems(self.samples, self.optimizer.weight_decay)
        found += self.optimizer.problems()
        found += self.mesh.problems()
        found += self.checkpoint.problems() + self.evaluation.problems() + self.log.problems()
        found += tracker_problems(self.log.trackers)
        # What lies between two parts is looked at where both are fine by themselves.
        return found or self._cross_problems()

    def _dtype_problems(self) -> list[Problem]:
        """A model can be of 64-bit numbers; sums, optimizer and the loss of a run have 32 bits."""
        names = [name for name in ("param_dtype", "compute_dtype") if getattr(self.model, name) == "float64"]
        return [Problem(f"model.{name}", "is 'float64', which no run keeps", "float32") for name in names]

    def _cross_problems(self) -> list[Problem]:
        found = self.mesh.problems(model=self.model, seq_len=self.seq_len)
        copies = self.mesh.data * self.mesh.fsdp
        for setting, count in self._at_once():
            if count % copies:
                better = -(-count // copies) * copies
                message = f"is {count}, which data x fsdp = {copies} devices cannot share"
                hint = f"{setting}={better}, or another mesh.data or mesh.fsdp"
                found.append(Problem(setting, message, hint))
        if self.check_every and not self.batch.lanes:
            message = f"is {self.check_every}, and batch.lanes=0 is one world without replicas to compare"
            found.append(Problem("check_every", message, "check_every=0, or batch.lanes=8"))
        if self.optimizer.flat_shards not in (0, self.mesh.fsdp):
            message = (
                f"is {self.optimizer.flat_shards}, and {self.mesh.fsdp} devices share the state (mesh.fsdp)"
            )
            hint = f"optimizer.flat_shards={self.mesh.fsdp}, or 0 for moments that lie as parameters do"
            found.append(Problem("optimizer.flat_shards", message, hint))
        if self.data.vocab_size > self.model.vocab_size:
            message = f"is {self.model.vocab_size}, fewer than data.vocab_size={self.data.vocab_size}"
            found.append(
                Problem("model.vocab_size", message, f"model.vocab_size={self.data.vocab_size} or more")
            )
        return found

    def world_problems(self, owners: Sequence[int]) -> list[Problem]:
        """Every mistake that shows once it is known to which process each device of the mesh belongs.

        A worker adds lanes to the sum of all replicas by the array: of each it has one box, or all of them.
        """
        if not self.batch.lanes or self._lanes_fit(self.mesh, owners):
            return []
        mesh, copies = self.mesh, self.mesh.data * self.mesh.fsdp
        others = [
            replace(mesh, data=copies // fsdp, fsdp=fsdp)
            for fsdp in range(mesh.fsdp - 1, 0, -1)
            if copies % fsdp == 0
        ]
        hints = [
            f"mesh.data={other.data} mesh.fsdp={other.fsdp}"
            for other in others
            if self._lanes_fit(other, owners)
        ][:1]
        if mesh.zero > 1 and self._lanes_fit(replace(mesh, zero=1), owners):
            hints.append("mesh.zero=1")
        processes = len(set(owners))
        message = (
            f"is data {mesh.data} x fsdp {mesh.fsdp} x tensor {mesh.tensor} over {processes} processes: of "
            f"the sums of {self.batch.lanes} lanes (batch.lanes) each would have several parts, and not all"
        )
        hints += ["batch.lanes=0 (one world)", "--workers-per-replica 1"]
        return [Problem("mesh", message, f"{', '.join(hints[:-1])} or {hints[-1]}")]

    def _lanes_fit(self, mesh: MeshConfig, owners: Sequence[int]) -> bool:
        """Whether every process has one box of each sum of gradients, or all of them."""
        splits = {split_of(one, mesh, stored=mesh.zero >= 2) for one in parameters(self.model)}
        return all(
            len(mine) in (1, len(set().union(*held)))
            for held in (mesh.boxes(split, owners) for split in splits)
            for mine in held
        )

    def _at_once(self) -> list[tuple[str, int]]:
        """How many samples go through the model together, by the setting that says so."""
        if self.batch.micro:
            found = [("batch.micro", self.batch.micro)]
        else:
            found = [("batch.schedule", phase.size) for phase in self.batches.phases]
        return [*found, ("evaluation.batch", self.evaluation.batch)] if self.evaluation.every else found

    def check(self) -> None:
        """Nothing, if the config is fine. Fails: ConfigError, which lists every mistake."""
        refuse(self.problems())

    def _canonical(self) -> bytes:
        return msgspec.json.encode(msgspec.to_builtins(self), order="sorted")
