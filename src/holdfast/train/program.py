"""`run_training`: from a config to a trained model, alone or as one worker of a launched run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

import jax
import msgspec
import xxhash

import holdfast.supervise
from holdfast.checkpoint import committed_steps
from holdfast.errors import MismatchError, UsageError
from holdfast.storage import opened
from holdfast.supervise import Run
from holdfast.supervise.inheritance import inheritance
from holdfast.supervise.joining import keeping, own_folder
from holdfast.supervise.run_lock import RunLock
from holdfast.train.config import TrainConfig
from holdfast.train.data import Stream
from holdfast.train.evaluation import Evaluation
from holdfast.train.fingerprint import fingerprints
from holdfast.train.loop import Loop
from holdfast.train.metrics import MetricsFile
from holdfast.train.model.hub import check_weights, read_params
from holdfast.train.problems import Problem, refuse
from holdfast.train.programs import Programs
from holdfast.train.reporting import Reporter, on_terminal
from holdfast.train.state import (
    CONFIG,
    RunOptions,
    State,
    bits_digest,
    check_clock,
    compare_config,
    compare_data,
    compare_optimizer,
    compare_processes,
    described,
    fresh,
    has_steps,
    keep_start,
    ledger_of,
    own_checkpoints,
    taken_over,
    written_whole,
)
from holdfast.train.step import Steps
from holdfast.train.trackers import named
from holdfast.train.transformations import check_fits, digest, made
from holdfast.train.update import Optimizer

log = logging.getLogger("holdfast.train")

METRICS: Final = "metrics.jsonl"
RESULT: Final = "result.json"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of a run, as one worker saw it."""

    name: str
    folder: Path
    steps: int
    samples: int
    loss: float | None
    """Of the last step; None if there was none to do, and no result of an earlier start tells it."""
    state: str
    """A digest of all arrays of the state: equal for equal bits, on any mesh."""
    ledger: str
    """The ledger of all samples consumed."""
    stopped: bool
    """Whether it was told to stop before its end."""


def run_training(config: TrainConfig, options: RunOptions | None = None) -> Outcome:
    """Train, from wherever the run is to its end.

    Blocks: for the whole run. Under launch, first until this process is given a seat; when the run is told to
    stop, the process exits from within. Fails: ConfigError with every mistake, UsageError, DataError;
    LeaseError, if another process has the run; SaveError, if all is done and the last state could not be
    saved.
    """
    options = options or RunOptions()
    options.check()
    config.check()
    config = replace(config, data=config.data.spelled_out())
    name = options.name or config.name
    engine = _Engine(config)
    try:
        with (
            _held(options, name),
            holdfast.supervise.join(
                rehearse=engine.rehearse,
                name=name,
                lanes=config.batch.lanes or None,
                keep=config.checkpoint.keep or None,
                checkpoints=config.checkpoint.folder or None,
                mirror=config.checkpoint.mirror or None,
                folder=options.folder,
            ) as run,
        ):
            return engine.train(run, options)
    finally:
        engine.close()


def _held(options: RunOptions, name: str) -> contextlib.AbstractContextManager[object]:
    """The run, for this process alone; under launch that has it. Fails: LeaseError, UsageError."""
    if inheritance() is not None:
        return contextlib.nullcontext()
    return RunLock(own_folder(Path(options.folder), name))


def _built(config: TrainConfig, split: str) -> Stream:
    """The stream of a split. Fails: ConfigError, if the model has no embedding for some of its token ids;
    DataError."""
    stream = config.data.build(seq_len=config.seq_len, seed=config.seed, split=split)
    if stream.vocab_size > config.model.vocab_size:
        stream.close()
        message = f"is {config.model.vocab_size}, and the {split} data has {stream.vocab_size} token ids"
        refuse([Problem("model.vocab_size", message, f"model.vocab_size={stream.vocab_size} or more")])
    return stream


def _optimizer(config: TrainConfig) -> tuple[Optimizer, str]:
    """The optimizer, and a digest of what a named transformation computes. Runs the function that makes it.

    Fails: ConfigError, if that makes none that fits the model.
    """
    if not config.optimizer.transformation:
        return config.optimizer.build(), ""
    transformation = made(config.optimizer)
    check_fits(config.optimizer, transformation, config.model)
    return config.optimizer.build(transformation), digest(transformation, config.model)


@final
class _Engine:
    """What a run is computed with; made before there is a seat as far as that goes."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._programs: Programs | None = None
        self._first_state = ""
        self._optimizer, self._computes = _optimizer(config)
        self._stream = _built(config, "train")
        self._held_out: Stream | None = None
        if config.evaluation.every:
            try:
                self._held_out = _built(config, "valid")
            except BaseException:
                self._stream.close()
                raise

    def close(self) -> None:
        """Close the data."""
        for stream in (self._stream, self._held_out):
            if stream is not None:
                stream.close()

    def rehearse(self) -> None:
        """Load or compile what a step needs, where that may be done before a seat is given."""
        kept = keeping()
        if kept is not None:
            self._made(*kept)

    def _made(self, folder: Path, key: bytes) -> Programs:
        if self._programs is None:
            config = self._config
            layout = config.mesh.build()
            refuse(config.world_problems([one.process_index for one in layout.mesh.devices.flat]))
            steps = Steps(
                config,
                config.model.build(),
                layout,
                self._optimizer,
                separate=self._stream.separate,
            )
            self._programs = Programs(steps, folder, key)
            self._programs.ready_for(config.batches.size_at(0))
        return self._programs

    def train(self, run: Run, options: RunOptions) -> Outcome:
        config = self._config
        changed = compare_config(run.folder, config, options.accept)
        changed |= compare_processes(run.folder, jax.process_count(), options.accept)
        compare_optimizer(run.folder, config, self._computes, options.accept)
        run.agree("config", bits_digest(config))
        # What no sample came from yet may change between two launches, and not between two workers of one.
        run.agree("data", self._stream.digest)
        programs = self._made(run.folder, run.key)
        begins = not has_steps(run.folder, config)
        takes_over = bool(options.source) and begins
        given = options if begins else RunOptions()
        if begins and not options.brings_parameters:
            programs.ready(("made",), 0)  # now: nobody waits yet for the state that it makes
        with _told_by_settings(run, begins):
            state = run.restore(
                lambda: self._first(run, programs, given), into=described(config, programs), steps=self._seen
            )
        if not config.batch.lanes and run.replicas > 1:
            raise UsageError(
                f"batch.lanes=0 is one world, and this run has {run.replicas} replicas",
                hint="--replicas 1, or batch.lanes=8 to sum the gradients of replicas",
            )
        before = Path(options.source) if takes_over and "data" in options.parts else run.folder
        same = compare_data(before, self._stream, ledger_of(state).samples)
        thorough = changed or takes_over or not same
        check_clock(state, run.step, config.batches, self._stream, thorough=thorough)
        if changed and not begins and run.step >= config.total_steps:
            raise UsageError(
                f"all {config.total_steps:,} steps of this run are made: none would have other settings",
                hint="samples=... for a longer run, or give a new run its own --name",
            )
        if run.alone:  # under launch the agent has said it
            print(self._start(run, ledger_of(state).samples), flush=True)
        evaluation = None if self._held_out is None else Evaluation(programs, self._held_out)
        reporter = self._reporter(run, options)
        try:
            keep_start(run.folder, config, self._stream, self._computes)
            loop = Loop(config, run, programs, self._stream, reporter, evaluation)
            state = loop.run(state)
            return self._outcome(run, state, reporter, stopped=loop.stopped)
        finally:
            reporter.close()

    def _first(self, run: Run, programs: Programs, options: RunOptions) -> State:
        """The state of a run that has none yet. What comes from elsewhere is not made before: there may be no
        room for both."""
        config = self._config
        state = described(config, programs) if options.brings_parameters else fresh(config, programs)
        self._first_state = "a new state"
        if options.source:
            taken = options.step or 0

            def agreed(step: int) -> int:
                nonlocal taken
                taken = int(run.agreed("from", str(step)))
                return taken

            state = taken_over(state, options, config, agreed)
            self._first_state = f"{', '.join(options.parts)} of step {taken:,} in {options.source}"
        if options.weights:
            self._first_state = f"the weights in {options.weights}"
            check_weights(options.weights, config.model)
            state["params"] = read_params(options.weights, config.model, into=state["params"])
        if options.weights or (options.source and "params" in options.parts and "opt" not in options.parts):
            state["opt"] = None
            state["opt"] = programs.steps.new_optimizer(state["params"])
        return state

    def _start(self, run: Run, samples: int) -> str:
        """Where the run begins or goes on, as a line for people."""
        config = self._config
        if self._first_state:
            return f"begins at step {run.step:,} ({samples:,} samples) with {self._first_state}"
        place = own_checkpoints(run.folder, config)
        if config.checkpoint.mirror and run.step not in committed_steps(opened(place)):
            place = config.checkpoint.mirror
        how = "goes on from" if run.step < config.total_steps else "is at its end,"
        return f"{how} step {run.step:,} ({samples:,} samples) in {place}"

    def _seen(self, state: State) -> int:
        """How many steps a first state has seen. Fails: UsageError, if the schedule does not fit them."""
        schedule, samples = self._config.batches, ledger_of(state).samples
        schedule.check(samples)
        return schedule.step_at(samples)

    def _reporter(self, run: Run, options: RunOptions) -> Reporter:
        begins = not (run.folder / CONFIG).exists()
        bar = options.progress if options.progress is not None else run.alone and on_terminal()

        def say(line: str) -> None:
            if run.alone:
                print(line, flush=True)
            else:
                run.log("%s", line)

        return Reporter(
            self._config,
            MetricsFile(run.folder / METRICS),
            # A run that is under way goes on without a tracker; one that begins tells of a mistake.
            named(self._config.log.trackers if run.index == 0 else (), refuse=begins and run.leads),
            say=say,
            bar=bar,
            total=self._config.total_steps,
        )

    def _outcome(self, run: Run, state: State, reporter: Reporter, *, stopped: bool) -> Outcome:
        ledger, digest = ledger_of(state), state_digest(state)
        path = run.folder / RESULT
        outcome = Outcome(
            name=run.name,
            folder=run.folder,
            steps=run.step,
            samples=ledger.samples,
            loss=reporter.last["loss"] if reporter.last else _told_loss(path, digest),
            state=digest,
            ledger=ledger.digest,
            stopped=stopped,
        )
        if run.leads:
            told: dict[str, Any] = msgspec.to_builtins(outcome, builtin_types=(), enc_hook=str)
            text = msgspec.json.format(msgspec.json.encode({**told, "config": self._config.digest}))
            written_whole(path, f"{text.decode()}\n")
        return outcome


@contextlib.contextmanager
def _told_by_settings(run: Run, begins: bool) -> Iterator[None]:
    """A state that was saved and does not fit, in words for whoever gives settings, not arrays."""
    try:
        yield
    except MismatchError as error:
        if begins:  # what it is taken from is told by then
            raise
        raise MismatchError(
            error.problems,
            source="what this run has saved",
            hint="its model or optimizer was another one: give the settings of then, or begin another run "
            f"with what fits: --name OTHER --from {run.folder} --load params",
        ) from error


def _told_loss(path: Path, state: str) -> float | None:
    """The loss that an earlier start, which ended in the same state, wrote down; None if there is none."""
    try:
        told = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return told.get("loss") if told.get("state") == state else None


def state_digest(state: State) -> str:
    """One digest of all arrays of a state."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(sorted(fingerprints(state).items())))
