"""One mesh over two processes, under launch: it computes what one process does, and survives its end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import Checkpointer
from holdfast.errors import UsageError
from holdfast.journal import Record, RunRestored, SaveDurable
from holdfast.supervise.processes import end_marked
from holdfast.testing.launched import LaunchedRun
from holdfast.train.config import TrainConfig
from holdfast.train.metrics import read_metrics
from tests.train.curves import environment
from tests.train.recipes import recipe
from tests.train.runs import Bits, last_state, train

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]
REPOSITORY = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("spanning.py")
PROCESSES, DEVICES = 2, 2
STEPS, SAVED = 6, 3
TOLERANCE = 1e-5
"""Relative, in float32: processes add the parts of a sum in another order than devices of one process do."""
MEASURED = ("loss", "grad_norm", "param_norm", "eval_loss")


@dataclass(frozen=True)
class Shape:
    """A way to share a step among four devices."""

    recipe: str
    settings: tuple[str, ...]

    @property
    def config(self) -> TrainConfig:
        more = ("model.num_heads=4", "evaluation.every=3", f"checkpoint.every={SAVED}", "checkpoint.keep=1")
        return recipe(self.recipe, *more, *self.settings)


SHAPES = {
    # The gradients are summed between the processes; each has the whole state.
    "data across": Shape("one_world", ("mesh.data=2", "mesh.fsdp=2")),
    # And each has half of the state; the batch is two microbatches.
    "fsdp across": Shape("one_world", ("mesh.fsdp=4", "batch.micro=4")),
    # The sum of all lanes leaves the devices, and comes back to those of both processes.
    "lanes": Shape(
        "tiny", ("mesh.data=2", "mesh.fsdp=2", "batch.schedule=16", "batch.micro=4", "samples=96")
    ),
}


@dataclass(frozen=True)
class Ended:
    """What a run leaves behind."""

    numbers: list[dict[str, float]]
    arrays: Bits


def ended(run: Path) -> Ended:
    """Of each step what was measured, and each array of the last checkpoint."""
    records = read_metrics(run / "metrics.jsonl")
    assert [one["step"] for one in records] == list(range(STEPS))
    with Checkpointer(run / "ckpt", journal=False) as kept:
        assert kept.steps() == [STEPS], "one step is to be kept"
    numbers = [{name: one[name] for name in MEASURED if name in one} for one in records]
    return Ended(numbers, last_state(run, STEPS))


@contextmanager
def launched(config: TrainConfig, folder: Path, replicas: int = 1) -> Iterator[LaunchedRun]:
    """A run of replicas of two workers with two devices each; all its processes end with the block."""
    written = folder / "config.json"
    written.write_text(config.to_json(), encoding="utf-8")
    settings = environment()
    settings["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={DEVICES}"
    settings["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    )
    try:
        with LaunchedRun(
            SCRIPT,
            str(written),
            folder=folder,
            replicas=replicas,
            workers_per_replica=PROCESSES,
            # A worker that waits for one that holds still is not to be taken for one that hangs.
            options=("--nproc", "1", "--step-s", "100", "--lanes", str(config.batch.lanes or 1)),
            env=settings,
        ) as run:
            yield run
    finally:
        end_marked({"HOLDFAST_FOLDER": str(folder / "run")}, timeout_s=20.0)


Calm = Callable[[str], tuple[Path, Ended]]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """Gives where a run of a shape was that nobody disturbed, and what came of it; each is made once."""
    made: dict[str, tuple[Path, Ended]] = {}

    def undisturbed(shape: str) -> tuple[Path, Ended]:
        if shape not in made:
            folder = tmp_path_factory.mktemp("calm")
            with launched(SHAPES[shape].config, folder) as run:
                assert run.wait(100.0) == 0, run.tail()
            made[shape] = folder, ended(run.folder)
        return made[shape]

    return undisturbed


@pytest.mark.parametrize("shape", SHAPES)
def test_two_processes_train_as_one_does(shape: str, calm: Calm, tmp_path: Path) -> None:
    folder, found = calm(shape)
    expected = ended(train(SHAPES[shape].config, tmp_path).folder)
    for step, (numbers, others) in enumerate(zip(found.numbers, expected.numbers, strict=True)):
        assert numbers == pytest.approx(others, rel=TOLERANCE, abs=0.0), step
    assert found.numbers[-1]["loss"] < found.numbers[0]["loss"] - 1.0
    assert list(found.arrays) == list(expected.arrays)
    for name, (dtype, dims, raw) in found.arrays.items():
        assert (dtype, dims) == expected.arrays[name][:2], name
        mine, theirs = (np.frombuffer(one, dtype) for one in (raw, expected.arrays[name][2]))
        if dtype != "float32":
            assert mine.tolist() == theirs.tolist(), name  # samples, ledger, random key
        else:
            assert np.linalg.norm(mine - theirs) <= TOLERANCE * np.linalg.norm(theirs), name
    # Each process read its own part of each microbatch, and of all that the run consumed nothing else.
    config = SHAPES[shape].config
    micro = config.batch.micro or config.batches.size_at(0)
    half = micro // PROCESSES
    for index in range(PROCESSES):
        own = [(at + index * half, at + (index + 1) * half) for at in range(0, config.samples, micro)]
        assert [span for span in reads(folder, index) if span[0] < config.samples] == own


def reads(folder: Path, index: int) -> list[tuple[int, int]]:
    """The ranges of samples that a worker has read, each as often as it did."""
    lines = (folder / f"reads-{index}").read_text(encoding="utf-8").splitlines()
    return sorted((int(start), int(stop)) for start, stop in map(str.split, lines))


def test_a_process_is_killed_and_both_go_on_with_the_same_bits(calm: Calm, tmp_path: Path) -> None:
    _, expected = calm("fsdp across")
    (tmp_path / "fault").write_text("kill", encoding="utf-8")
    with launched(SHAPES["fsdp across"].config, tmp_path) as run:
        assert run.wait(100.0) == 0, run.tail()
    assert not (tmp_path / "fault").exists()
    assert restored(run) == [(0, "init")] * PROCESSES + [(SAVED, "vault")] * PROCESSES
    assert_same(ended(run.folder), expected)


def test_all_are_killed_and_the_next_launch_goes_on_from_the_disk(calm: Calm, tmp_path: Path) -> None:
    config = SHAPES["fsdp across"].config
    _, expected = calm("fsdp across")
    fault = tmp_path / "fault"
    fault.write_text("hold", encoding="utf-8")
    with launched(config, tmp_path) as run:
        run.await_record(_saved, 100.0)
        # Nobody gets beyond the step at which one holds still: there is no newer state to be saved.
        run.process.kill()
        run.wait(20.0)
        assert end_marked({"HOLDFAST_FOLDER": str(run.folder)}, timeout_s=20.0) > PROCESSES
    fault.unlink(missing_ok=True)
    with Checkpointer(run.folder / "ckpt", journal=False) as kept:
        assert kept.steps() == [SAVED]
    with launched(config, tmp_path) as run:
        assert run.wait(100.0) == 0, run.tail()
    assert restored(run) == [(0, "init")] * PROCESSES + [(SAVED, "disk")] * PROCESSES
    assert_same(ended(run.folder), expected)


def test_as_many_processes_go_on_and_no_other_number(calm: Calm) -> None:
    folder, _ = calm("data across")
    config = SHAPES["data across"].config
    assert (folder / "run" / "processes").read_text(encoding="utf-8") == f"{PROCESSES}\n"
    with pytest.raises(UsageError, match="started with 2 processes in a replica, and now there is 1"):
        train(config, folder, name="run")
    assert (folder / "run" / "processes").read_text(encoding="utf-8") == f"{PROCESSES}\n"
    (folder / "run" / "processes").write_text("1\n", encoding="utf-8")  # the other way round
    with launched(config, folder) as run:
        assert run.wait(100.0) == 78, run.tail()
    assert "started with 1 process in a replica, and now there are 2" in run.tail()
    (folder / "run" / "processes").write_text(f"{PROCESSES}\n", encoding="utf-8")


def test_lanes_that_cannot_be_summed_are_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    config = SHAPES["lanes"].config.override(["mesh.data=1", "mesh.fsdp=4"])
    with launched(config, tmp_path) as run:
        assert run.wait(100.0) == 78, run.tail()
    assert "mesh is data 1 x fsdp 4 x tensor 1 over 2 processes: of the sums of 4 lanes" in run.tail()
    assert "mesh.data=2 mesh.fsdp=2" in run.tail()
    assert not (run.folder / "bundles").exists()


@pytest.mark.full
def test_replicas_of_two_processes_end_in_the_bits_of_one(calm: Calm, tmp_path: Path) -> None:
    _, expected = calm("lanes")
    with launched(SHAPES["lanes"].config, tmp_path, replicas=2) as run:
        assert run.wait(100.0) == 0, run.tail()
    assert_same(ended(run.folder), expected)


def _saved(record: Record) -> bool:
    return isinstance(record.event, SaveDurable) and record.event.step == SAVED


def restored(run: LaunchedRun) -> list[tuple[int, str]]:
    """The step that each process began with, and where it had the state from."""
    events = [one.event for one in run.records()]
    return [(one.step, one.source) for one in events if isinstance(one, RunRestored)]


def assert_same(found: Ended, expected: Ended) -> None:
    """Said by name: a difference of all arrays cannot be read."""
    names = sorted({*found.arrays, *expected.arrays})
    assert [name for name in names if found.arrays.get(name) != expected.arrays.get(name)] == []
    assert found.numbers == expected.numbers
