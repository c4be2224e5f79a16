"""The state of a run: what a checkpoint holds, in parts that can be loaded one by one.

    params    the parameters
    opt       the optimizer's state
    rng       the random key of the run
    data      samples consumed so far, and the ledger of them

Everything else (learning rate, batch size, the order of the data) follows from the config and the samples.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import jax
import msgspec
import numpy as np
import xxhash

from holdfast.checkpoint import Checkpointer, committed_steps
from holdfast.checkpoint.run_folder import checkpoints_of
from holdfast.errors import (
    CorruptError,
    DataError,
    MismatchError,
    NoCheckpointError,
    UsageError,
)
from holdfast.storage import opened
from holdfast.train.batches import BatchSchedule
from holdfast.train.config import TrainConfig
from holdfast.train.data import Ledger, Stream
from holdfast.train.data.manifest import Manifest
from holdfast.train.overrides import settings_of
from holdfast.train.parameters import parameters
from holdfast.train.programs import Programs

PARTS: Final = ("params", "opt", "rng", "data")
CONFIG: Final = "config.json"
DATA: Final = "data.json"
"""Beside the config: the manifest of the data that the samples consumed were last compared with."""
OPTIMIZER: Final = "optimizer.digest"
"""Beside the config: what the transformation that it names computed when the run was last started."""
PROCESSES: Final = "processes"
"""Beside the config: how many processes the world of a replica had. What `--accept` calls it, too."""
_CHECKED: Final = 1_000_000
"""A ledger of up to so many samples is computed again at every start; it takes a moment."""
_FREE: Final = (
    "name",
    "check_every",
    "log.",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.at_batch_change",
    "checkpoint.mirror",
    "evaluation.",
)
"""Settings that change no bit of the parameters. Not where checkpoints lie: elsewhere there are others."""

State = dict[str, Any]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """How a run starts; not what it computes."""

    name: str = ""
    """Of the run, whose folder is runs/NAME; empty: that of the config. Under launch it is given."""
    folder: str = "runs"
    """`--folder`: where the folders of runs lie. Under launch it is given."""
    source: str = ""
    """`--from`: the run or checkpoint folder that a new run takes its first state from."""
    weights: str = ""
    """`--init-from`: the Hugging Face repository that a new run takes its first parameters from."""
    step: int | None = None
    """`--step`: which step of it; None: the newest that verifies."""
    load: tuple[str, ...] = PARTS
    """`--load`: which parts of that state; the others are new."""
    finetune: bool = False
    """`--finetune`: the parameters alone, everything else new; the same as `load=("params",)`."""
    strict: bool = True
    """Whether every array must be there and fit; otherwise those that are missing are new."""
    accept: tuple[str, ...] = ()
    """`--accept`: changed settings to go on with: paths, groups (`rate`), or `all`."""
    progress: bool | None = None
    """Whether to show a progress bar; None: on a terminal."""

    @property
    def parts(self) -> tuple[str, ...]:
        """What is loaded."""
        return ("params",) if self.finetune else self.load

    @property
    def brings_parameters(self) -> bool:
        """Whether all parameters of a new run come from elsewhere: then none are made."""
        return bool(self.weights or (self.source and self.strict and "params" in self.parts))

    def check(self) -> None:
        """Fails: UsageError, for options that say nothing sensible."""
        unknown = [part for part in self.load if part not in PARTS]
        if unknown or not self.load:
            raise UsageError(
                f"--load {','.join(self.load)}: there is no part {', '.join(unknown) or 'at all'}",
                hint=f"choose from {','.join(PARTS)}",
            )
        if self.source and self.weights:
            raise UsageError(
                f"--from {self.source} and --init-from {self.weights}",
                hint="a run begins from another run's state or from a repository's weights",
            )
        if self.finetune and self.load not in (PARTS, ("params",)):
            raise UsageError(
                f"--finetune and --load {','.join(self.load)}: the first takes over the parameters alone",
                hint="give one of them",
            )
        if self.source and "opt" in self.parts and "params" not in self.parts:
            raise UsageError(
                f"--load {','.join(self.load)}: the optimizer's state goes with the parameters that it is of",
                hint="--load params,opt and what else is wanted; or leave opt away",
            )
        if self.source:
            return
        if self.step is not None:
            raise UsageError(
                f"--step {self.step} without --from",
                hint="a run goes on from its own newest step; to go back, start a new run from the old one: "
                f"--name OTHER --from runs/THIS --step {self.step}",
            )
        given = {
            "--finetune": self.finetune,
            f"--load {','.join(self.load)}": self.load != PARTS,
            "--no-strict": not self.strict,
        }
        if any(given.values()):
            raise UsageError(
                f"{' '.join(name for name, one in given.items() if one)} without --from",
                hint="it says what a new run takes over from another one: --name OTHER --from runs/THIS",
            )


def fresh(config: TrainConfig, programs: Programs) -> State:
    """The state of a run that has seen nothing."""
    programs.ready(("made",), 0)
    return {**described(config, programs), **programs.call("made", 0, jax.random.key(config.seed))}


def described(config: TrainConfig, programs: Programs) -> State:
    """That state without the large arrays: `params` and `opt` say only of what shape and where they are."""
    # Not `device_put`: in a world of several processes nobody can reach all devices.
    rng = jax.jit(partial(jax.random.fold_in, data=1), out_shardings=programs.steps.layout.replicated())
    key = jax.random.key(config.seed)
    return {**programs.steps.described, "rng": rng(key), "data": cursor(Ledger.empty())}


def cursor(ledger: Ledger) -> dict[str, Any]:
    """The data part: arrays, so that it is saved, moved and compared like everything else."""
    return {"samples": np.asarray(ledger.samples, np.int64), "ledger": ledger.words}


def ledger_of(state: State) -> Ledger:
    """The ledger that a state holds."""
    return Ledger.restored(int(state["data"]["samples"]), np.asarray(state["data"]["ledger"]))


def taken_over(
    state: State, options: RunOptions, config: TrainConfig, agreed: Callable[[int], int] = int
) -> State:
    """A fresh state, or the description of one, with the parts that are asked for out of another run.

    `agreed` gives the step that all workers take for the one that this worker would: each may find another,
    where the other run goes on or has damaged steps. Blocks: while reading. Fails: NoCheckpointError,
    MismatchError, CorruptError for a step that is given or agreed on; UsageError, for the state of another
    optimizer.
    """
    folder = checkpoint_folder(options.source)
    checkpointer = Checkpointer(folder, journal=False, rank=jax.process_index(), world=jax.process_count())
    try:
        if "opt" in options.parts:
            _check_optimizer(checkpointer, folder, options.step, config)
        load = partial(checkpointer.load, into=state, parts=options.parts, strict=options.strict, wait_s=0.0)
        loaded: State = load(step=options.step)
        assert checkpointer.last_load is not None
        found = checkpointer.last_load.step
        step = found if options.step is not None else agreed(found)
        if step != found:
            loaded = {}  # there may be no room for both
            loaded = load(step=step)
    except MismatchError as error:
        raise MismatchError(
            error.problems,
            source=f"the checkpoint in {folder}",
            hint="give the same model and optimizer, load fewer parts (--load params), or --no-strict "
            "to leave what is missing as it is new",
        ) from error
    finally:
        checkpointer.close()
    return loaded


def _check_optimizer(kept: Checkpointer, folder: str, step: int | None, config: TrainConfig) -> None:
    """Fails: UsageError. Two transformations may well have arrays of the same names and shapes."""
    try:
        before = kept.metadata(step).get("optimizer")
    except (CorruptError, NoCheckpointError):
        return  # loading says it better, or takes an older step
    mine = config.optimizer.named
    if before is not None and before != mine:
        raise UsageError(
            f"the checkpoint in {folder} has the optimizer state of {before}, and this run has {mine}",
            hint="--load params,rng,data leaves that state; or give the same optimizer.transformation",
        )


def has_steps(folder: Path, config: TrainConfig) -> bool:
    """Whether the run in `folder` has saved a step: it then goes on from its own, and takes over nothing."""
    return bool(committed_steps(opened(own_checkpoints(folder, config))))


def own_checkpoints(folder: Path, config: TrainConfig) -> str:
    """Where the run in `folder` saves its steps."""
    return config.checkpoint.folder or str(folder / "ckpt")


def checkpoint_folder(source: str) -> str:
    """Where the checkpoints of a run are, given its folder or theirs, or a place in an object store.

    Fails: NoCheckpointError; StorageError for a store that does not answer.
    """
    place = opened(source)
    if not place.is_place() and not place.below("ckpt").is_place():
        raise NoCheckpointError(
            f"--from {source}: there is no such folder", hint="the folder of a run, or where it saved"
        )
    return checkpoints_of(place, opened).root


def check_clock(state: State, steps: int, schedule: BatchSchedule, stream: Stream, *, thorough: bool) -> None:
    """Fails: UsageError, if the state's samples do not fit the schedule, the step, or the data."""
    ledger = ledger_of(state)
    schedule.check(ledger.samples)
    if schedule.step_at(ledger.samples) != steps:
        raise UsageError(
            f"the state has seen {steps} steps and {ledger.samples:,} samples, which the schedule takes in "
            f"{schedule.step_at(ledger.samples)} steps",
            hint="keep the entries of batch.schedule that lie in the past",
        )
    if thorough or ledger.samples <= _CHECKED:
        expected = stream.ledger(ledger.samples)
        if expected != ledger:
            raise UsageError(
                f"the ledger of {ledger.samples:,} samples consumed is {ledger.digest}, and with this data "
                f"it would be {expected.digest}: until here it was other data, or another seed",
                hint="give the data and the seed of the run; or begin the data anew: --load params,opt,rng",
            )


# ---- the config and the data that a run was started with


def compare_config(folder: Path, config: TrainConfig, accept: tuple[str, ...]) -> bool:
    """Compare the config with the one that is kept in the run's folder; whether it changes bits.

    Settings that change none may differ, and those that are accepted. Fails: UsageError, which names every
    other one with both values; for an `accept` that names no setting.
    """
    _check_accepted(accept, config)
    try:
        kept = TrainConfig.from_json((folder / CONFIG).read_bytes())
    except FileNotFoundError:
        return False
    except UsageError as error:
        raise UsageError(
            f"{folder / CONFIG}: {error.message}",
            hint="it says what the run was started with; put it back, or remove it to trust the command",
        ) from error
    if kept == config:
        return False
    before, after = settings_of(kept), settings_of(config)
    changed = [name for name in dict.fromkeys([*before, *after]) if before.get(name) != after.get(name)]
    # No accepting makes the arrays that are saved fit another model.
    other = parameters(kept.model) != parameters(config.model) and has_steps(folder, config)
    refused = [
        name
        for name in changed
        if not _free(name, config) and (not _accepted(name, accept) or (other and name.startswith("model.")))
    ]
    if refused:
        lines = [f"{name} was {before.get(name)!r} and is {after.get(name)!r}" for name in refused]
        hint = f"--accept {','.join(refused)} to go on with the new ones, or give a new run its own --name"
        if other:
            hint = "a model of other arrays is another run: give it its own --name"
        raise UsageError(
            "this run was started with other settings:\n" + "\n".join(f"  - {line}" for line in lines),
            hint=hint,
        )
    return any(not _free(name, config) for name in changed)


def compare_optimizer(folder: Path, config: TrainConfig, computes: str, accept: tuple[str, ...]) -> None:
    """Compare what the named transformation computes with what it did when the run was last started.

    A digest of another version of JAX or optax says nothing. Fails: UsageError.
    """
    try:
        kept = (folder / OPTIMIZER).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return
    comparable = kept.partition(":")[0] == computes.partition(":")[0]
    if comparable and kept != computes and not _accepted("optimizer.transformation", accept):
        raise UsageError(
            f"{config.optimizer.named} computes something else than when this run was last started: "
            "its code has changed",
            hint="put the code back, or go on with it as it is: --accept optimizer.transformation",
        )


def compare_processes(folder: Path, processes: int, accept: tuple[str, ...]) -> bool:
    """Compare the number of processes in a replica's world with that of the last start; whether it changed.

    Between processes sums are made in another order than inside of one: the bits would be others. Fails:
    UsageError, which names both.
    """
    path = folder / PROCESSES
    try:
        text = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return False
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(
            f"{path} holds {text[:40]!r}, and no number of processes",
            hint="it says in how many the run was started; put it back, or remove it to trust the command",
        )
    before = int(text)
    if before != processes and not _accepted(PROCESSES, accept):
        raise UsageError(
            f"this run was started with {_counted(before)} in a replica, and now there {_are(processes)}: "
            "sums between processes have other bits",
            hint=f"holdfast launch --workers-per-replica {before}, or --accept {PROCESSES} to go on with "
            "other bits, or give a new run its own --name",
        )
    return before != processes


def _counted(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"


def _are(processes: int) -> str:
    return "is 1" if processes == 1 else f"are {processes}"


def kept_manifest(folder: Path) -> Manifest | None:
    """The manifest of the data that the run in `folder` was last started with; None if none was kept.

    Fails: DataError, if it is damaged: what it would have told is not to be passed over.
    """
    path = folder / DATA
    try:
        return Manifest.from_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        why = f"cannot read {path}: {error.strerror}"
        raise DataError(why, file=str(path), hint="check its mode") from error
    except UsageError as error:
        raise DataError(
            f"{path} is {error.message}",
            file=str(path),
            hint="it says what data the run has read; put it back, or remove it to trust the data that is "
            "there: then the ledger alone is compared",
        ) from None


def compare_data(folder: Path, stream: Stream, samples: int) -> bool:
    """Whether the stream is what the run read until now, as far as the manifest that was kept says.

    Fails: DataError, for a source that some of the first `samples` came from and that has other tokens now;
    for a manifest that is damaged.
    """
    kept = kept_manifest(folder)
    if kept is None:
        return False  # then the ledger says it alone
    now, counts = {entry.name: entry for entry in stream.manifest.sources}, stream.counts(samples)
    changed = [
        now[before.name]
        for before in kept.sources
        if before.name in now and counts[before.name] and not before.holds_what(now[before.name])
    ]
    if changed:
        paths = ", ".join(entry.path for entry in changed)
        raise DataError(
            f"other tokens than when this run was last started are in {paths}",
            file=f"{changed[0].path}.bin",
            hint="put the files of the run back, or begin a new run that reads these from the first sample: "
            f"--name OTHER --from {folder} --load params,opt,rng",
        )
    return kept.digest == stream.digest


def keep_start(folder: Path, config: TrainConfig, stream: Stream, computes: str = "") -> None:
    """Keep config, data, optimizer and the number of processes for the next start to be compared with. For
    one known to work."""
    written_whole(folder / CONFIG, config.to_json())
    written_whole(folder / PROCESSES, f"{jax.process_count()}\n")
    written_whole(folder / DATA, stream.manifest.to_json().decode())
    if computes:
        written_whole(folder / OPTIMIZER, f"{computes}\n")
    else:
        (folder / OPTIMIZER).unlink(missing_ok=True)


def bits_digest(config: TrainConfig) -> str:
    """A hash of what all workers of a run must have alike: every setting but those that change no bit."""
    told = {name: value for name, value in settings_of(config).items() if not _listed(name)}
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(told, order="sorted"))


def _free(name: str, config: TrainConfig) -> bool:
    if name == "samples":  # the length of the run; the rate depends on it unless it says otherwise
        return bool(config.rate.decay) or config.rate.shape == "constant"
    return _listed(name)


def _listed(name: str) -> bool:
    return any(name == one or (one.endswith(".") and name.startswith(one)) for one in _FREE)


def _accepted(name: str, accept: tuple[str, ...]) -> bool:
    return any(one in ("all", name) or name.startswith(f"{one}.") for one in accept)


def _check_accepted(accept: tuple[str, ...], config: TrainConfig) -> None:
    known = dict.fromkeys(["all", PROCESSES])
    for name in settings_of(config):
        known |= dict.fromkeys(name[:at] for at, sign in enumerate(name) if sign == ".") | {name: None}
    unknown = [one for one in accept if one not in known]
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, n=1)
        raise UsageError(
            f"--accept {','.join(unknown)}: there is no such setting",
            hint=f"did you mean {close[0]}?" if close else "a setting (model.hidden), a group (rate), or all",
        )


def written_whole(path: Path, text: str) -> None:
    """Write a file that is there whole, or as it was before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f"{path.name}.{os.getpid()}")
    made.write_text(text, encoding="utf-8")
    os.replace(made, path)
