"""What the loop does beside the steps: metrics of a checkpoint, times of steps, comparisons of replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from holdfast.checkpoint import Checkpointer
from holdfast.errors import DivergedError, UnreachableError
from holdfast.supervise import Run
from holdfast.supervise.saving import RunSaver
from holdfast.train import loop, reporting
from holdfast.train.config import TrainConfig
from holdfast.train.divergence import Report
from holdfast.train.evaluation import Evaluation
from holdfast.train.fingerprint import fingerprints
from holdfast.train.loop import Loop
from holdfast.train.metrics import MetricsFile, read_metrics
from holdfast.train.reporting import Reporter
from holdfast.train.trackers import named
from tests.train.recipes import recipe
from tests.train.runs import train
from tests.train.tiny import tiny

pytestmark = pytest.mark.process


def metadata(folder: Path) -> dict[int, Mapping[str, Any]]:
    """The metrics in the metadata of every checkpoint of a run."""
    with Checkpointer(folder / "ckpt", journal=False) as kept:
        return {step: kept.metadata(step).get("metrics", {}) for step in kept.steps()}


def test_a_loss_that_is_not_finite_is_skipped_and_stops_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summed = Loop._summed

    def bad(self: Loop, params: Any, start: int, stop: int) -> Any:
        sums = summed(self, params, start, stop)
        if start // 8 != 1:
            return sums
        return {**jax.tree.map(lambda one: one * np.float32(math.nan), sums), "tokens": sums["tokens"]}

    monkeypatch.setattr(Loop, "_summed", bad)
    config = tiny("samples=32", "checkpoint.every=1", "checkpoint.keep=0")
    outcome = train(config, tmp_path)
    assert outcome.steps == 4
    assert [one["skipped"] for one in read_metrics(outcome.folder / "metrics.jsonl")] == [0, 1, 0, 0]
    found = metadata(outcome.folder)
    assert list(found) == [1, 2, 3, 4]
    assert "loss" not in found[2]
    assert "loss" in found[3]
    assert found[4]["loss"] == outcome.loss


@pytest.mark.parametrize(
    ("config", "saved"),
    [
        pytest.param(tiny("checkpoint.every=3"), [3, 6, 8], id="lanes"),
        pytest.param(recipe("one_world", "checkpoint.every=2", "samples=40"), [2, 4, 5], id="one world"),
        pytest.param(recipe("small", "checkpoint.every=0"), [4, 9], id="a batch that grows"),
    ],
)
def test_a_step_is_in_the_file_before_its_state_is_saved(
    config: TrainConfig, saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on from that state does not come back to the step, and could not write its line."""
    written: dict[int, list[int]] = {}
    save = RunSaver.save

    def noting(self: RunSaver, steps: int, *args: Any, **more: Any) -> None:
        records = read_metrics(tmp_path / config.name / "metrics.jsonl")
        written.setdefault(steps, [one["step"] for one in records])
        save(self, steps, *args, **more)

    monkeypatch.setattr(RunSaver, "save", noting)
    outcome = train(config.override(["checkpoint.keep=0"]), tmp_path)
    assert written == {steps: list(range(steps)) for steps in saved}
    losses = [one["loss"] for one in read_metrics(outcome.folder / "metrics.jsonl")]
    assert {steps: one["loss"] for steps, one in metadata(outcome.folder).items()} == {
        steps: losses[steps - 1] for steps in saved
    }


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(tiny("checkpoint.every=0"), id="lanes"),
        pytest.param(recipe("one_world", "checkpoint.every=0", "samples=64"), id="one world"),
    ],
)
def test_a_step_is_in_the_file_before_a_stop_saves_its_state(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under launch a run stops between two steps, where the loop does not know of it."""
    boundary, save = Run._boundary, RunSaver.save
    written: list[list[int]] = []

    def stopping(self: Run) -> None:
        boundary(self)
        if self.step == 4:
            self._end(stopped=True)
            raise SystemExit(0)

    def noting(self: RunSaver, *args: Any, **more: Any) -> None:
        records = read_metrics(tmp_path / config.name / "metrics.jsonl")
        written.append([one["step"] for one in records])
        save(self, *args, **more)

    monkeypatch.setattr(Run, "_boundary", stopping)
    monkeypatch.setattr(RunSaver, "save", noting)
    with pytest.raises(SystemExit):
        train(config, tmp_path)
    assert written == [[0, 1, 2, 3]]
    (loss,) = [one["loss"] for one in metadata(tmp_path / config.name).values()]
    assert loss == read_metrics(tmp_path / config.name / "metrics.jsonl")[3]["loss"]


def test_steps_that_are_not_saved_wait_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    flush = Reporter.flush

    def counted(self: Reporter) -> None:
        flushed.append(self.last.get("step", -1))
        flush(self)

    monkeypatch.setattr(Reporter, "flush", counted)
    train(tiny("checkpoint.every=0"), tmp_path)
    # Before what a size of batch needs is made ready; before the last state is saved, and after.
    assert set(flushed) == {-1, 6, 7}


def test_the_held_out_loss_is_in_the_checkpoint_of_the_state_it_was_measured_on(tmp_path: Path) -> None:
    config = tiny(
        "samples=48", "checkpoint.every=1", "checkpoint.keep=0", "evaluation.every=2", "evaluation.samples=8"
    )
    outcome = train(config, tmp_path)
    records = read_metrics(outcome.folder / "metrics.jsonl")
    measured = {one["step"] + 1: one["eval_loss"] for one in records if "eval_loss" in one}
    assert list(measured) == [2, 4, 6]
    found = metadata(outcome.folder)
    assert {step: one["eval_loss"] for step, one in found.items() if "eval_loss" in one} == measured


@dataclass
class Clock:
    """Time that passes only where a test lets it."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(reporting, "time", made)
    return made


def test_a_step_takes_as_long_as_its_lanes_whatever_follows_it(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    summed, measure = Loop._summed, Evaluation.loss

    def slow(self: Loop, params: Any, start: int, stop: int) -> Any:
        clock.now += 0.25
        return summed(self, params, start, stop)

    def slower(self: Evaluation, params: Any) -> float:
        clock.now += 100.0
        return measure(self, params)

    monkeypatch.setattr(Loop, "_summed", slow)
    monkeypatch.setattr(Evaluation, "loss", slower)
    config = tiny(
        "samples=48",
        "evaluation.every=3",
        "evaluation.samples=8",
        "batch.schedule=0:8 16:12 40:8",
        "batch.unit=samples",
    )
    outcome = train(config, tmp_path)
    records = read_metrics(outcome.folder / "metrics.jsonl")
    assert [one["seconds"] for one in records] == pytest.approx([1.0] * config.total_steps)
    sizes = np.diff([0, *(one["samples"] for one in records)])
    assert [one["tokens_per_s"] for one in records] == pytest.approx((sizes * config.seq_len).tolist())


class Late:
    """A number that a device has after a while."""

    def __init__(self, clock: Clock, at: float) -> None:
        self._clock, self._at = clock, at

    def block_until_ready(self) -> Late:
        self._clock.now = max(self._clock.now, self._at)
        return self

    def __float__(self) -> float:
        self.block_until_ready()
        return 1.0


def test_without_lanes_a_step_ends_when_its_numbers_come(tmp_path: Path, clock: Clock) -> None:
    names = ("loss", "grad_norm", "param_norm")
    file = MetricsFile(tmp_path / "metrics.jsonl")
    reporter = Reporter(tiny(), file, named(()), say=lambda line: None, bar=False, total=8)
    reporter.restart_clock()
    busy = 0.0
    for step in range(4):
        busy = max(busy, clock.now) + 2.0  # the device works on one step after the other
        found = {name: Late(clock, busy) for name in names}
        numbers = {"step": step, "batch": 8, "devices": 1, "rate": 0.0}
        if step == 1:
            numbers["seconds"] = reporter.lap(found)
            clock.now += 100.0  # an evaluation
            reporter.restart_clock()
        reporter.step(numbers, found, leads=True)
    reporter.flush()
    reporter.close()
    assert [one["seconds"] for one in read_metrics(tmp_path / "metrics.jsonl")] == [2.0] * 4


class Seat:
    """What a comparison sees of a run: a worker of the second replica, each of which has two."""

    alone = False

    def __init__(self, index: int, words: dict[int, bytes]) -> None:
        self.index, self.slot = index, 2 + index
        self.told: list[Report] = []
        self._words = words

    def tell(self, name: str, value: bytes) -> None:
        self.told.append(msgspec.msgpack.decode(value, type=Report))

    def heard(self, name: str) -> dict[int, bytes]:
        return self._words

    def log(self, message: str, *values: object) -> None:
        pass


def take_seat(monkeypatch: pytest.MonkeyPatch, index: int, words: dict[int, bytes]) -> Seat:
    """Let the loop compare as if it were such a worker."""
    seat, compare = Seat(index, words), Loop._compare

    def seated(self: Loop, step: int, state: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(self, "_run", seat)
            compare(self, step, state)

    monkeypatch.setattr(Loop, "_compare", seated)
    return seat


@pytest.mark.parametrize("index", [0, 1])
def test_all_workers_of_a_replica_compute_fingerprints_and_the_first_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    seat = take_seat(monkeypatch, index, {})
    computed: list[dict[str, str]] = []

    def counted(tree: Any) -> dict[str, str]:
        computed.append(fingerprints(tree))
        return computed[-1]

    monkeypatch.setattr(loop, "fingerprints", counted)
    train(tiny("check_every=2"), tmp_path)
    # After 2, 4 and 6 steps. Nobody looks at what would be told after the eighth, the last.
    assert len(computed) == 3
    assert [max(one.prints) for one in seat.told] == ([2, 4, 6] if index == 0 else [])


@pytest.mark.parametrize("corrupt", [0, 2])
def test_all_workers_of_a_replica_that_differs_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corrupt: int
) -> None:
    prints = {slot: {"w": "ff" if slot == corrupt else "00"} for slot in (0, 2, 4)}
    take_seat(monkeypatch, 1, {slot: Report({2: one}).encoded() for slot, one in prints.items()})
    config = tiny("check_every=2", "samples=32")
    if corrupt == 2:
        with pytest.raises(DivergedError, match="slot 2 differs in w"):
            train(config, tmp_path)
    else:
        assert train(config, tmp_path).steps == 4


def test_training_goes_on_while_the_coordinator_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seat = take_seat(monkeypatch, 0, {})

    def away(*_: object) -> Any:
        raise UnreachableError("the coordinator does not answer")

    monkeypatch.setattr(seat, "tell", away)
    monkeypatch.setattr(seat, "heard", away)
    assert train(tiny("check_every=2", "samples=32"), tmp_path).steps == 4


def test_workers_compare_their_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agreed: list[tuple[str, str]] = []
    stream = tiny().data.build(seq_len=tiny().seq_len)
    monkeypatch.setattr(Run, "agree", lambda self, name, value: agreed.append((name, value)))
    for number, setting in enumerate(("log.every=1", "log.every=2", "seed=3")):
        train(tiny("samples=24", setting), tmp_path, name=f"run-{number}")
    values = [value for name, value in agreed if name == "config"]
    assert len(values) == 3
    assert values[0] == values[1] != values[2]
    assert [value for name, value in agreed if name == "data"] == [stream.digest] * 3
    # Workers that differ in what changes no bit still compare their programs.
    names = [name for name, _ in agreed if name.startswith("program/")]
    assert len(set(names)) == 2 * len(names) // 3
