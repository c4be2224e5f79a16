"""`holdfast plan` and `holdfast train`: what they print, and mistakes without a traceback."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from holdfast.checkpoint import Checkpointer
from holdfast.cli.curves import chart, value_at
from holdfast.errors import UsageError
from holdfast.launch import LaunchSettings
from holdfast.recipes import resolve, small, tiny
from holdfast.supervise.run_lock import RunLock
from holdfast.train import TrainConfig
from holdfast.train.data import Source
from holdfast.train.program import Outcome
from tests.cli.saved import answer, holdfast

QUICK = ("--no-compile", "--device", "h200")


def test_a_plan_says_what_a_run_will_be() -> None:
    done = holdfast("plan", "recipes.small", *QUICK)
    assert (done.exit_code, done.stderr) == (0, "")
    for line in (
        "small   config",
        "parameters  238,272",
        "steps  263: 6,416 samples, 821.2K tokens",
        "8 lanes x 2 x 2",
        "causal attention halved",
        "learning rate  0 at first, 0.003 at most",
        "data 1 x fsdp 1 x tensor 1 = 1 device a replica, ZeRO 3",
        "layers/*/qkv",
        "fits on H200",
        "smallest replica: 1 device (as it is)",
    ):
        assert line in done.stdout
    assert "█" in done.stdout


def test_a_plan_of_a_mesh_says_where_arrays_lie() -> None:
    done = holdfast("plan", "recipes.dense_1b", "mesh.fsdp=2", "mesh.tensor=2", *QUICK)
    assert done.exit_code == 0
    assert "embed/fsdp 2, mlp/tensor 2" in done.stdout
    assert "data 1 x fsdp 2 x tensor 2 = 4 devices" in done.stdout


def test_the_smallest_replica_is_named_by_settings_that_give_it() -> None:
    given = ["mesh.data=2", "batch.lanes=0", "batch.micro=0", "batch.schedule=64", "model.layers=scanned"]
    given += ["model.repeats=320", "model.hidden=4096"]
    done = holdfast("plan", "recipes.dense_1b", *given, "--no-compile", "--device", "A100 40GB")
    found = re.search(r"smallest replica: (\d+) devices \((.*)\)", done.stdout)
    assert found, done.stdout
    assert "mesh.data=1" in found[2]
    changed = resolve("recipes.dense_1b", [*given, *found[2].split()])
    assert changed.mesh.num_devices == int(found[1])
    assert changed.evaluation.batch == changed.mesh.fsdp > 8


def test_a_plan_as_json() -> None:
    found = answer("plan", "recipes.dense_1b", *QUICK)
    assert found["num_params"] == 956_368_896
    assert found["memory"]["params"] == 4 * found["num_params"]
    assert found["memory"]["total"] == sum(
        found["memory"][name] for name in ("params", "optimizer", "sums", "casts", "kept", "workspace")
    )
    assert found["smallest"]["num_devices"] == 1
    assert found["compiler"] == []


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "small.svg"
    done = holdfast("plan", "recipes.small", "--no-compile", "--picture", path)
    assert done.exit_code == 0
    assert "--device H200 says whether it fits" in done.stdout
    root = ElementTree.parse(path).getroot()
    lines = [node.attrib["points"].split() for node in root.iter() if node.tag.endswith("polyline")]
    assert len(lines) == 2
    rate, batch = lines
    assert len(rate) > 100
    # A staircase: up once, and on to the end.
    assert len({point.split(",")[1] for point in batch}) == len(small().batches.phases)
    assert holdfast("plan", "recipes.small", "--no-compile", "--picture", tmp_path).exit_code == 2
    url = f"file://{tmp_path}/again.svg"
    assert holdfast("plan", "recipes.small", "--no-compile", "--picture", url).exit_code == 0
    assert (tmp_path / "again.svg").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("plan", "recipes.tinny"), "did you mean recipes.tiny?"),
        (("plan", "recipes.tiny", "model.hiden=3"), "did you mean model.hidden?"),
        (("plan", "recipes.tiny", "--device", "abacus"), "known are GB200"),
        (("train", "recipes.tiny", "rate.peak=0", "seed=-1"), "2 mistakes"),
        (("train", "recipes.tiny", "--parked", "1"), "--parked without --replicas"),
        (("train", "recipes.tiny", "--samples", "640"), "hint: a setting has no dashes: samples=VALUE"),
        (("plan", "recipes.tiny", "--model.hidden=3"), "hint: a setting has no dashes: model.hidden=VALUE"),
        (("train", "recipes.tiny", "--accept", "smples"), "did you mean samples?"),
        (("train", "recipes.one_world", "--replicas", "2"), "batch.lanes=0 is one world"),
        (("train", "recipes.tiny", "--load", "weights"), "there is no part weights"),
        (("train", "recipes.tiny", "--step", "3"), "--step 3 without --from"),
        (("train", "recipes.tiny", "--replicas", "1", "--from", "nowhere"), "there is no such folder"),
        (("train", "recipes.tiny", "--replicas", "1", "--name", "a/b"), "is no name of a run"),
        (("train", "recipes.tiny", "log.trackers=no_such_module:make"), "no module no_such_module"),
    ],
)
def test_mistakes(words: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = holdfast(*words)
    assert done.exit_code == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def told(settings: LaunchSettings) -> tuple[TrainConfig, dict[str, Any]]:
    """What workers of a launch read."""
    _, config, options = map(Path, settings.script)
    return TrainConfig.from_json(config.read_bytes()), json.loads(options.read_bytes())


def test_a_second_launch_changes_nothing_under_a_live_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[LaunchSettings] = []
    words = ("train", "recipes.tiny", "--replicas", "1", "--folder", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.cli.launch.keep_going", lambda settings, plain: launches.append(settings))
        assert holdfast(*words).exit_code == 0
    before = told(launches[0])
    assert before[0] == tiny()
    with RunLock(tmp_path / "tiny"):
        done = holdfast(*words, "log.every=3", "--accept", "all")
    assert done.exit_code == 2
    assert "is launched already" in done.stderr
    assert told(launches[0]) == before


def test_changed_settings_are_refused_before_anything_starts(tmp_path: Path) -> None:
    run = tmp_path / "tiny"
    run.mkdir()
    (run / "config.json").write_text(tiny().to_json(), encoding="utf-8")
    done = holdfast("train", "recipes.tiny", "seed=1", "--replicas", "2", "--folder", tmp_path)
    assert done.exit_code == 2
    assert "seed was 0 and is 1" in done.stderr
    assert "--accept seed" in done.stderr
    assert [path.name for path in run.iterdir()] == ["config.json"]
    assert (run / "config.json").read_text(encoding="utf-8") == tiny().to_json()


def test_a_run_of_more_processes_is_refused_before_anything_starts(tmp_path: Path) -> None:
    run = tmp_path / "tiny"
    run.mkdir()
    (run / "processes").write_text("2\n", encoding="utf-8")
    for more in ((), ("--replicas", "2")):
        done = holdfast("train", "recipes.tiny", *more, "--folder", tmp_path)
        assert done.exit_code == 2
        assert "started with 2 processes in a replica, and now there is 1" in done.stderr
        assert "--accept processes" in done.stderr
    assert [path.name for path in run.iterdir()] == ["processes"]


def test_what_has_no_effect_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[LaunchSettings] = []
    monkeypatch.setattr("holdfast.cli.launch.keep_going", lambda settings, plain: launches.append(settings))
    words = ("train", "recipes.tiny", "--replicas", "1", "--folder", tmp_path)
    assert holdfast(*words).stderr == ""
    unused = holdfast(*words, "--accept", "rate")
    assert unused.stderr == "--accept rate has no effect: no setting differs that changes bits\n"
    saved(tmp_path / "tiny" / "ckpt", 4)
    gone = tmp_path / "gone"
    effect = "has no effect: the run goes on from the steps that it has saved itself"
    for option in ("--from", "--init-from"):
        again = holdfast(*words, option, gone)
        assert (again.exit_code, again.stderr) == (0, f"{option} {gone} {effect}\n")
    (tmp_path / "tiny" / "config.json").write_text(tiny().to_json(), encoding="utf-8")
    assert holdfast(*words, "seed=1", "--accept", "seed").stderr == ""
    assert len(launches) == 5


def test_a_damaged_manifest_is_refused_before_anything_starts(tmp_path: Path) -> None:
    run = tmp_path / "tiny"
    saved(run / "ckpt", 4)
    (run / "data.json").write_text("{", encoding="utf-8")
    done = holdfast("train", "recipes.tiny", "--replicas", "1", "--folder", tmp_path)
    assert done.exit_code == 2
    assert f"{run / 'data.json'} is not the manifest of a stream" in done.stderr
    assert "remove it to trust the data" in done.stderr
    assert not (run / "start").exists()


def saved(folder: Path, step: int) -> None:
    """A step, of whatever."""
    with Checkpointer(folder, journal=False) as kept:
        kept.save(step, {"w": np.ones(3)}).durable(60.0)


def test_a_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "train",
        "recipes.tiny",
        "model.repeats=1",
        "model.hidden=16",
        "model.mlp_hidden=16",
        "seq_len=16",
    ]
    words += [
        "rate.warmup=8",
        "rate.decay=1K",
        "evaluation.every=0",
        "--name",
        "mine",
        "--folder",
        "elsewhere",
    ]
    first = holdfast(*words, "samples=64")
    assert first.exit_code == 0, first.stderr
    assert "2 steps, 64 samples" in first.stderr
    again = holdfast(*words, "samples=128")
    assert "4 steps, 128 samples" in again.stderr
    assert again.stdout.startswith(
        f"goes on from step 2 (64 samples) in {tmp_path / 'elsewhere/mine/ckpt'}\n"
    )
    folder = tmp_path / "elsewhere" / "mine"
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["samples"] == 128


def test_a_stopped_run_ends_as_a_stopped_launch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = Outcome(
        name="tiny", folder=tmp_path, steps=4, samples=32, loss=1.0, state="ab", ledger="cd", stopped=True
    )
    monkeypatch.setattr("holdfast.train.run_training", lambda *_: done)
    ended = holdfast("train", "recipes.tiny", "--folder", tmp_path)
    assert (ended.exit_code, ended.stderr) == (
        75,
        "stopped after 4 steps; the same command goes on from there\n",
    )


def test_workers_read_the_blend_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[LaunchSettings] = []
    monkeypatch.setattr("holdfast.cli.launch.keep_going", lambda settings, plain: launches.append(settings))
    blend = tmp_path / "blend.json"
    blend.write_text('{"builtin:tiny": 1}', encoding="utf-8")
    words = ("train", "recipes.tiny", f"data.blend={blend}", "--replicas", "1", "--folder", tmp_path)
    assert holdfast(*words).exit_code == 0
    blend.write_text('{"builtin:tiny": 2}', encoding="utf-8")
    assert holdfast(*words).exit_code == 0
    first, second = (told(one)[0].data for one in launches)
    assert (first.blend, first.sources) == ("", (Source(path="builtin:tiny", weight=1.0),))
    assert second.sources == (Source(path="builtin:tiny", weight=2.0),)


def test_a_plan_is_made_where_the_compiler_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(config: TrainConfig) -> None:
        raise RuntimeError("cuDNN is not detected.\nand more")

    monkeypatch.setattr("holdfast.train.compiler.findings", failing)
    done = holdfast("plan", "recipes.tiny", "--device", "h200")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "fits on H200" in done.stdout
    assert "not asked: RuntimeError: cuDNN is not detected." in " ".join(done.stdout.split())


def test_a_plan_of_a_named_optimizer_needs_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise UsageError("jax not installed here", hint="pip install 'holdfast[train]'")

    monkeypatch.setattr("holdfast.cli.plan.needs_jax", missing)
    done = holdfast("plan", "recipes.tiny", "optimizer.transformation=optax:lion", *QUICK)
    assert done.exit_code == 2
    assert "pip install 'holdfast[train]'" in done.stderr
    assert holdfast("plan", "recipes.tiny", *QUICK).exit_code == 0


def test_charts() -> None:
    points = [(0.0, 0.0), (10.0, 1.0), (20.0, 1.0)]
    assert [value_at(points, place) for place in (0, 5, 10, 15, 30)] == [0.0, 0.5, 1.0, 1.0, 1.0]
    assert chart(points, width=5, height=2) == ["  ███", " ████"]
    assert chart([(0.0, 0.0), (1.0, 0.0)], width=4, height=1) == [""]
