"""How a run starts: which parts of which state, and what of a config may change meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import Checkpointer
from holdfast.errors import (
    DataError,
    LeaseError,
    MismatchError,
    NoCheckpointError,
    SaveError,
    UsageError,
)
from holdfast.supervise import Run
from holdfast.supervise.run_lock import RunLock
from holdfast.train.config import TrainConfig
from holdfast.train.data import Stream
from holdfast.train.programs import Programs
from holdfast.train.state import (
    CONFIG,
    DATA,
    PROCESSES,
    RunOptions,
    bits_digest,
    compare_config,
    compare_data,
    compare_processes,
    keep_start,
    kept_manifest,
    taken_over,
)
from tests.train.data.sets import write_set
from tests.train.runs import last_state, train
from tests.train.tiny import tiny


def stream(config: TrainConfig) -> Stream:
    return config.data.build(seq_len=config.seq_len, seed=config.seed)


def keep(folder: Path, config: TrainConfig) -> None:
    keep_start(folder, config, stream(config))


def test_a_config_that_was_cut_off_is_named(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(tiny().to_json()[:100])
    with pytest.raises(UsageError, match=r"config\.json: this is no config"):
        compare_config(tmp_path, tiny(), ())


def test_accepting_a_setting_that_does_not_exist_names_it(tmp_path: Path) -> None:
    for accepted, hint in (("smples", "did you mean samples?"), ("rate.pek", "did you mean rate.peak?")):
        with pytest.raises(UsageError, match=f"--accept {accepted}: there is no such") as caught:
            compare_config(tmp_path, tiny(), ("rate", accepted))
        assert caught.value.hint == hint


def test_a_changed_config_is_refused_with_both_values_and_the_flag(tmp_path: Path) -> None:
    assert not compare_config(tmp_path, tiny(), ())
    assert not (tmp_path / CONFIG).exists()  # whether it works is not known yet
    keep(tmp_path, tiny())
    assert not compare_config(tmp_path, tiny(), ())
    changed = tiny("rate.peak=1e-3", "batch.schedule=16", "log.every=1")
    with pytest.raises(UsageError) as caught:
        compare_config(tmp_path, changed, ("batch",))
    assert "rate.peak was 0.01 and is 0.001" in caught.value.message
    assert "batch" not in caught.value.message
    assert "log.every" not in caught.value.message
    assert "--accept rate.peak" in (caught.value.hint or "")
    assert compare_config(tmp_path, changed, ("batch", "rate.peak"))
    assert (tmp_path / CONFIG).read_text() == tiny().to_json()
    keep(tmp_path, changed)
    assert (tmp_path / CONFIG).read_text() == changed.to_json()
    assert compare_config(tmp_path, tiny(), ("all",))


def test_another_mesh_changes_bits_and_is_refused_unless_accepted(tmp_path: Path) -> None:
    keep(tmp_path, tiny())
    with pytest.raises(UsageError, match=r"mesh\.data was 1 and is 2") as caught:
        compare_config(tmp_path, tiny("mesh.data=2"), ())
    assert "--accept mesh.data" in (caught.value.hint or "")
    assert compare_config(tmp_path, tiny("mesh.data=2"), ("mesh",))


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (2, 1, "started with 2 processes in a replica, and now there is 1"),
        (1, 2, "started with 1 process in a replica, and now there are 2"),
    ],
)
def test_another_number_of_processes_is_refused_unless_accepted(
    before: int, after: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not compare_processes(tmp_path, after, ())  # of a run that has not begun nothing is known
    monkeypatch.setattr("jax.process_count", lambda: before)
    keep(tmp_path, tiny())
    assert not compare_processes(tmp_path, before, ())
    with pytest.raises(UsageError, match=says) as caught:
        compare_processes(tmp_path, after, ("mesh",))
    hint = caught.value.hint or ""
    assert f"--workers-per-replica {before}" in hint
    assert "--accept processes" in hint
    for accepted in ("processes", "all"):
        assert not compare_config(tmp_path, tiny(), (accepted,))  # and it is a word that is known
        assert compare_processes(tmp_path, after, (accepted,))


def test_a_number_of_processes_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / PROCESSES).write_text("tw", encoding="utf-8")
    with pytest.raises(UsageError, match="processes holds 'tw'"):
        compare_processes(tmp_path, 1, ("all",))


def test_no_accepting_makes_saved_arrays_fit_another_model(tmp_path: Path) -> None:
    keep(tmp_path, tiny())
    other = tiny("model.hidden=32", "rate.peak=1e-3")
    assert compare_config(tmp_path, other, ("all",))  # nothing is saved yet
    with Checkpointer(tmp_path / "ckpt", journal=False) as kept:
        kept.save(4, {"w": np.ones(3)}).durable(60.0)
    with pytest.raises(UsageError, match=r"model\.hidden was 16 and is 32") as caught:
        compare_config(tmp_path, other, ("all",))
    assert "rate.peak" not in caught.value.message
    assert "its own --name" in (caught.value.hint or "")
    assert compare_config(tmp_path, tiny("rate.peak=1e-3"), ("all",))


def test_a_saved_state_that_does_not_fit_is_told_in_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unfit(*_: object, **__: object) -> None:
        raise MismatchError(["opt/mu: missing"], hint="parts= selects a subset")

    config = tiny("samples=8", "rate.warmup=0")
    train(config, tmp_path, name="one")
    monkeypatch.setattr(Run, "restore", unfit)
    with pytest.raises(MismatchError, match="template and what this run has saved disagree") as caught:
        train(config, tmp_path, name="one")
    assert f"--name OTHER --from {tmp_path / 'one'} --load params" in (caught.value.hint or "")


def test_what_changes_no_bit_may_change(tmp_path: Path) -> None:
    keep(tmp_path, tiny("rate.shape=constant"))
    assert not compare_config(tmp_path, tiny("rate.shape=constant", "samples=128", "checkpoint.every=9"), ())
    keep(tmp_path / "other", tiny())
    with pytest.raises(UsageError, match="samples was 64 and is 128"):  # the rate falls over the whole run
        compare_config(tmp_path / "other", tiny("samples=128"), ())
    with pytest.raises(
        UsageError, match=r"checkpoint\.folder was '' and is 'there'"
    ):  # with other steps in it
        compare_config(tmp_path / "other", tiny("checkpoint.folder=there"), ())


def test_workers_agree_on_what_changes_bits() -> None:
    same = bits_digest(tiny())
    assert (
        bits_digest(tiny("log.every=1", "checkpoint.keep=9", "evaluation.every=2", "check_every=1")) == same
    )
    for other in (
        "seed=1",
        "samples=128",
        "data.separate=false",
        "model.hidden=32",
        "checkpoint.folder=there",
    ):
        assert bits_digest(tiny(other)) != same, other


def test_options_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="no part weights"):
        RunOptions(load=("params", "weights")).check()
    with pytest.raises(UsageError, match="--step 3 without --from"):
        RunOptions(step=3).check()
    with pytest.raises(UsageError, match="--finetune without --from"):
        RunOptions(finetune=True).check()
    with pytest.raises(UsageError, match="--load params --no-strict without --from"):
        RunOptions(load=("params",), strict=False).check()
    with pytest.raises(UsageError, match="goes with the parameters that it is of"):
        RunOptions(source="runs/other", load=("opt", "rng")).check()
    with pytest.raises(UsageError, match="--finetune and --load params,rng: the first takes over"):
        RunOptions(source="runs/other", finetune=True, load=("params", "rng")).check()
    RunOptions(source="runs/other", finetune=True, load=("params",)).check()
    RunOptions(source="runs/other", step=3, load=("params",), strict=False).check()
    assert RunOptions(finetune=True).parts == ("params",)


def test_all_workers_take_over_the_step_that_they_agree_on(tmp_path: Path) -> None:
    """Whatever each of them finds: the other run may go on, and a step be damaged where one alone looks."""
    with Checkpointer(tmp_path, writer="thread", rank=0, world=1, journal=False) as ckpt:
        for step in (100, 200):
            ckpt.save(step, {"params": {"w": np.full(3, step)}}).durable(60.0)
    asked: list[int] = []

    def agreed(found: int) -> int:
        asked.append(found)
        return 100

    options = RunOptions(source=str(tmp_path), finetune=True)
    template = {"params": {"w": np.zeros(3, np.int64)}}
    assert taken_over(template, options, tiny())["params"]["w"][0] == 200
    assert taken_over(template, options, tiny(), agreed)["params"]["w"][0] == 100
    assert asked == [200]


def test_a_run_belongs_to_one_process(tmp_path: Path) -> None:
    with RunLock(tmp_path / "tiny"):
        with pytest.raises(LeaseError, match="is launched already, by process"):
            train(tiny(), tmp_path)
        assert [path.name for path in (tmp_path / "tiny").iterdir()] == ["launch.lock"]
    with pytest.raises(UsageError, match="is no name of a run"):
        train(tiny(), tmp_path, name="a/b")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


@pytest.mark.process
def test_a_new_run_takes_over_what_it_is_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("checkpoint.keep=0")
    whole = train(config, tmp_path, name="whole")
    called: list[str] = []
    call = Programs.call

    def counted(self: Programs, name: str, *args: Any) -> Any:
        called.append(name)
        return call(self, name, *args)

    monkeypatch.setattr(Programs, "call", counted)
    source = str(tmp_path / "whole")
    # All parts, from the middle: the rest of the same run.
    fork = train(config, tmp_path, name="fork", source=source, step=3)
    assert (fork.state, fork.ledger, fork.steps) == (whole.state, whole.ledger, 8)
    # With steps of its own it needs the other run no more.
    shutil.copytree(tmp_path / "whole", tmp_path / "gone")
    train(tiny("samples=32", "rate.decay=64"), tmp_path, name="own", source=str(tmp_path / "gone"), step=3)
    shutil.rmtree(tmp_path / "gone")
    own = train(tiny("rate.decay=64"), tmp_path, name="own", source=str(tmp_path / "gone"), step=3)
    assert (own.steps, own.ledger) == (8, whole.ledger)
    # The parameters alone: the clock starts anew.
    tuned = train(config, tmp_path, name="tuned", source=f"{source}/ckpt", finetune=True)
    assert tuned.samples == 64
    assert tuned.state != whole.state
    assert tuned.loss is not None
    assert whole.loss is not None
    assert tuned.loss < whole.loss
    # No state was made beside one that came from elsewhere: there may be no room for both.
    assert "made" not in called
    # Everything but the data: the optimizer goes on, the samples begin again.
    again = train(config, tmp_path, name="again", source=source, load=("params", "opt", "rng"))
    assert again.ledger == whole.ledger
    assert again.state not in (whole.state, tuned.state)

    # All workers take the step that the first of them found.
    with monkeypatch.context() as patch:
        patch.setattr(Run, "agreed", lambda self, name, value: "3" if name == "from" else value)
        assert train(config, tmp_path, name="third", source=source).state == whole.state
    other = {"params": {"embed": np.zeros((3, 4), np.float32)}, "opt": {}, "rng": {}, "data": {}}
    with pytest.raises(MismatchError, match="embed") as caught:
        taken_over(other, RunOptions(source=source, finetune=True), config)
    assert "--load params" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="until here it was other data, or another seed"):
        train(tiny("seed=9"), tmp_path, name="seed", source=source, step=3)
    with pytest.raises(NoCheckpointError, match="no such folder"):
        train(config, tmp_path, name="none", source=str(tmp_path / "nowhere"))


@pytest.mark.process
def test_narrow_parameters_are_tuned_from_where_they_are(tmp_path: Path) -> None:
    """The optimizer keeps them in float32 too: copies of the new ones, not of what was there before."""
    config = tiny("model.param_dtype=bfloat16", "samples=8", "rate.warmup=0")
    train(config, tmp_path, name="whole")
    still = config.override(["rate.peak=1e-12"])
    train(still, tmp_path, name="tuned", source=str(tmp_path / "whole"), finetune=True)
    before, after = last_state(tmp_path / "whole", 1), last_state(tmp_path / "tuned", 1)
    params = [name for name in before if name.startswith("params/")]
    assert params
    assert [name for name in params if before[name] != after[name]] == []


@pytest.mark.process
def test_a_run_that_saves_elsewhere_is_taken_over_from_its_folder(tmp_path: Path) -> None:
    config = tiny("samples=32", f"checkpoint.folder={tmp_path / 'kept'}")
    train(config, tmp_path, name="first")
    source = str(tmp_path / "first")
    done = train(tiny("samples=40"), tmp_path, name="second", source=source)
    assert (done.steps, done.samples) == (5, 40)


@pytest.mark.process
def test_a_run_that_is_over_takes_no_other_settings(tmp_path: Path) -> None:
    """Its config says what made its states: none would be made with another."""
    config = tiny("samples=40")
    train(config, tmp_path)
    with pytest.raises(UsageError, match="all 5 steps of this run are made"):
        train(config.override(["rate.peak=0.5"]), tmp_path, accept=("rate.peak",))
    assert (tmp_path / "tiny" / CONFIG).read_text() == config.to_json()
    assert train(config, tmp_path).steps == 5
    longer = train(tiny("samples=48", "rate.peak=0.5"), tmp_path, accept=("all",))
    assert longer.steps == 6


@pytest.mark.process
def test_a_schedule_that_changes_the_past_is_refused(tmp_path: Path) -> None:
    train(tiny("samples=40", "rate.decay=64"), tmp_path)
    grown = tiny("rate.decay=64", "batch.unit=samples", "batch.schedule=0:8 40:12")
    done = train(grown, tmp_path, accept=("batch",))
    assert (done.steps, done.samples) == (7, 64)
    with pytest.raises(UsageError, match="inside a batch of 24"):
        train(tiny("batch.schedule=24", "rate.decay=64"), tmp_path, accept=("all",))
    assert (tmp_path / "tiny" / CONFIG).read_text() == grown.to_json()  # the one that works


@pytest.mark.process
def test_other_data_under_the_same_name_is_noticed_however_long_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.train.state._CHECKED", 0)  # every run is a long one
    words = tmp_path / "words"
    config = tiny(f'data.sources=[{{"path": "{words}"}}]', "data.vocab_size=300", "data.split=1")
    write_set(words, documents(50))
    first = train(config.override(["samples=16", "rate.decay=64"]), tmp_path)
    assert compare_data(first.folder, stream(config), 16)
    write_set(words, documents(60))
    longer = config.override(["rate.decay=64"])
    with pytest.raises(DataError, match=f"other tokens .* are in {words}"):
        train(longer, tmp_path)
    (first.folder / DATA).unlink()  # then the ledger notices: documents lie elsewhere
    with pytest.raises(UsageError, match="until here it was other data"):
        train(longer, tmp_path)


@pytest.mark.process
def test_data_of_the_same_lengths_and_other_tokens_is_refused(tmp_path: Path) -> None:
    words = tmp_path / "words"
    config = tiny(f'data.sources=[{{"path": "{words}"}}]', "data.vocab_size=300", "data.split=1")
    write_set(words, documents(50))
    whole = train(config, tmp_path, name="whole")
    cut = config.override(["samples=16", "rate.decay=64"])
    rest = config.override(["rate.decay=64"])
    first = train(cut, tmp_path, name="cut")
    write_set(words, documents(50, first=1))
    assert whole.ledger == stream(config).ledger(64).digest  # a ledger knows places, not tokens
    with pytest.raises(DataError, match=f"other tokens .* are in {words}") as caught:
        train(rest, tmp_path, name="cut")
    assert caught.value.file == f"{words}.bin"
    assert "--load params,opt,rng" in (caught.value.hint or "")
    with pytest.raises(DataError, match="other tokens"):  # nor does a new run take over the place in it
        train(rest, tmp_path, name="fork", source=str(first.folder))
    begun = train(rest, tmp_path, name="begun", source=str(first.folder), load=("params", "opt", "rng"))
    assert begun.samples == 64
    write_set(words, documents(50))  # put back
    assert train(rest, tmp_path, name="cut").state == whole.state


@pytest.mark.process
def test_a_damaged_manifest_is_named_and_not_passed_over(tmp_path: Path) -> None:
    config = tiny("samples=16", "rate.decay=64")
    first = train(config, tmp_path)
    path = first.folder / DATA
    whole = path.read_bytes()
    assert kept_manifest(first.folder) is not None
    longer = tiny("rate.decay=64")
    for damaged in (whole[:50], b"", b"{}", b"\xff" + whole):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"data\.json is not the manifest of a stream: ") as caught:
            train(longer, tmp_path)
        assert caught.value.file == str(path)
        assert "put it back, or remove it" in (caught.value.hint or "")
        assert path.read_bytes() == damaged
    path.unlink()
    assert kept_manifest(first.folder) is None
    path.mkdir()
    with pytest.raises(DataError, match=r"cannot read .*data\.json: Is a directory"):
        kept_manifest(first.folder)
    path.rmdir()
    assert train(longer, tmp_path).steps == 8
    assert path.exists()


def test_only_what_has_been_read_is_compared(tmp_path: Path) -> None:
    """A source that a stage brings in later may still be made."""
    paths = [write_set(tmp_path / name, documents(50)) for name in ("old", "new")]
    sources = f'data.sources=[{{"path": "{paths[0]}"}}, {{"path": "{paths[1]}", "weight": 0}}]'
    stages = 'data.stages=[{"start": 32, "weights": [0.5, 0.5]}]'
    config = tiny(sources, stages, "data.vocab_size=300", "data.split=1")
    keep(tmp_path, config)
    write_set(tmp_path / "new", documents(50, first=1))
    assert not compare_data(tmp_path, stream(config), 32)
    with pytest.raises(DataError, match=f"are in {paths[1]}"):
        compare_data(tmp_path, stream(config), 40)


def documents(length: int, *, first: int = 0) -> list[list[int]]:
    return [list(range(first + at, first + at + length)) for at in range(40)]


@pytest.mark.process
def test_a_last_state_that_cannot_be_saved_is_no_success(tmp_path: Path) -> None:
    """Saves that fail stop no training; but a run without its last state is not done."""
    config = tiny("samples=24", "checkpoint.every=2")
    in_the_way = tmp_path / "tiny" / "ckpt" / "step-00000003"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.write_text("no folder", encoding="utf-8")
    with pytest.raises(SaveError, match="step 3, the last one, is not saved"):
        train(config, tmp_path)
    assert not (tmp_path / "tiny" / "result.json").exists()
