"""The training loop: samples in, a state out, exactly once, whoever is lost meanwhile."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, final

import numpy as np
import xxhash

from holdfast.errors import DivergedError, UnreachableError
from holdfast.supervise import Run, Step
from holdfast.train.config import TrainConfig
from holdfast.train.data import Ledger, Stream
from holdfast.train.divergence import Report, reports_of, verdict
from holdfast.train.evaluation import Evaluation
from holdfast.train.feed import Feed
from holdfast.train.fingerprint import fingerprints
from holdfast.train.profiling import ProfileWindow
from holdfast.train.programs import Programs
from holdfast.train.reporting import Reporter
from holdfast.train.state import State, bits_digest, cursor, ledger_of

_CHECK: Final = "fingerprints"


@final
class Noted(Mapping[str, float]):
    """The metrics of a step's checkpoint. They are found when they are read: by a save of that state."""

    def __init__(self, find: Callable[[], dict[str, float]]) -> None:
        self._find = find

    def __bool__(self) -> bool:
        return True  # whoever asks that has not begun to save

    def __getitem__(self, name: str) -> float:
        return self._find()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._find())

    def __len__(self) -> int:
        return len(self._find())


@final
class Loop:
    """One worker's loop. Replicas compute lanes and apply the same sum; one world runs the whole step."""

    def __init__(
        self,
        config: TrainConfig,
        run: Run,
        programs: Programs,
        stream: Stream,
        reporter: Reporter,
        evaluation: Evaluation | None,
    ) -> None:
        self._config, self._run, self._programs, self._stream = config, run, programs, stream
        self._schedule = config.batches
        self._reporter = reporter
        self._evaluation = evaluation
        self._feed = Feed(programs.steps, stream, self._schedule)
        self._profile = ProfileWindow(config.log, run.folder / "profile" / f"slot-{run.slot}")
        self._report = Report({})
        self._ledger = Ledger.empty()
        self._size = 0
        # They do not change, and hashing them takes longer than a small step's other business.
        self._bits = bits_digest(config)
        self._about = {
            "config": config.digest,
            "schedule": xxhash.xxh3_64_hexdigest(repr(self._schedule.phases).encode()),
            "data": stream.digest,
            "optimizer": config.optimizer.named,
        }
        self.stopped = False

    def run(self, state: State) -> State:
        """Train to the end of the config's samples; the last state. Stops early where the run is told to."""
        config, run, total = self._config, self._run, self._config.total_steps
        self._ledger = ledger_of(state)
        every = config.checkpoint.every or None
        self._reporter.restart_clock()
        try:
            with _stop_signals(run.alone) as stop:
                for step in run.steps(until=total, save_every=every):
                    state = self._step(step, state)
                    if stop.is_set() and step.index + 1 < total:
                        self.stopped = True
                        # Before all else that an end takes: who stopped this may not wait for long.
                        self._reporter.flush()
                        run.finish()
                        break
        finally:
            self._reporter.flush()
            self._profile.close()
            self._feed.close()
        return state

    def _step(self, step: Step, state: State) -> State:
        config, schedule = self._config, self._schedule
        start, stop = schedule.batch_range(step.index)
        rate, decay = np.float32(config.learning_rate(start)), np.float32(config.weight_decay(start))
        self._feed.begin(step.index)
        self._profile.before(step.index)
        both = {"params": state["params"], "opt": state["opt"]}
        timed: dict[str, Any] = {}
        if config.batch.lanes:
            both, found = self._lanes(step, both, rate, decay)
            # The sum of all lanes was waited for: this is where one step ends and the next begins.
            timed["seconds"] = self._reporter.lap()
        else:
            both, found = self._world(start, stop, both, rate, decay)
        self._ledger = self._ledger.advance(start, stop, self._stream.identities(start, stop))
        state = {**both, "rng": state["rng"], "data": cursor(self._ledger)}
        self._profile.after(step.index, found)
        numbers: dict[str, Any] = {
            "step": step.index,
            "samples": stop,
            "rate": float(rate),
            "decay": float(decay),
            "batch": stop - start,
            "devices": self._programs.steps.layout.mesh.size * max(1, self._run.replicas),
            **timed,
        }
        self._evaluate(numbers, found, state["params"])
        self._reporter.step(numbers, found, leads=self._run.leads)
        save = config.checkpoint.at_batch_change and schedule.size_at(stop) != stop - start
        if save or self._saves_after(step.index + 1):
            self._reporter.flush()  # what comes now is no part of the step
        self._compare(step.index, state)
        step.done(state, Noted(lambda: self._noted(numbers)), meta=self._meta(stop), save=save)
        return state

    # ---- the two ways to make a step

    def _lanes(self, step: Step, both: State, rate: Any, decay: Any) -> tuple[State, Any]:
        """Lanes of this replica, and of those who are lost; then the same sum for all."""
        feed = self._feed
        start, stop = self._schedule.batch_range(step.index)
        micro = self._ready(stop - start)
        for lane in step.lanes:
            sums = self._summed(both["params"], *feed.lane(step.index, lane))
            step.add(lane, sums)
        total = self._programs.placed(step.total())
        feed.expect(step.lanes_computed)
        return self._programs.call("apply", micro, both, total, rate, decay)  # type: ignore[no-any-return]

    def _world(self, start: int, stop: int, both: State, rate: Any, decay: Any) -> tuple[State, Any]:
        """The whole batch in this world; XLA sums over its devices."""
        micro = self._ready(stop - start)
        if self._config.batch.is_fused(stop - start):
            (piece,) = self._feed.micros(start, stop)
            # It overwrites the state, which a save may still be reading.
            self._run.fence()
            return self._programs.call("fused", micro, both, piece, rate, decay)  # type: ignore[no-any-return]
        sums = self._summed(both["params"], start, stop)
        self._run.fence()
        return self._programs.call("apply", micro, both, sums, rate, decay)  # type: ignore[no-any-return]

    def _summed(self, params: Any, start: int, stop: int) -> Any:
        micro = self._feed.micro(start, stop)
        sums: Any = None
        for piece in self._feed.micros(start, stop):
            if sums is None:
                sums = self._programs.call("first", micro, params, piece)
            else:
                sums = self._programs.call("more", micro, sums, params, piece)
        return sums

    def _ready(self, size: int) -> int:
        """Have the programs for a batch of `size`, the same as all others; the samples of a microbatch."""
        if size == self._size:
            return self._programs.steps.config.batch.micro or size
        self._reporter.flush()  # what may be compiled now is no part of the step before
        micro = self._programs.ready_for(size)
        self._size = size
        for name, digest in self._programs.digests().items():
            self._run.agree(f"program/{self._bits[:16]}/{name}", digest)
        self._reporter.restart_clock()
        return micro

    # ---- beside the step

    def _evaluate(self, numbers: dict[str, Any], found: Any, params: Any) -> None:
        """Add the held-out loss to the numbers of a step after which it is due."""
        if self._evaluation is None or not self._evaluation.due(
            numbers["step"] + 1, self._config.total_steps
        ):
            return
        if "seconds" not in numbers:
            numbers["seconds"] = self._reporter.lap(found)
        with self._run.phase("eval"):
            numbers["eval_loss"] = self._evaluation.loss(params)
        self._reporter.restart_clock()

    def _saves_after(self, steps: int) -> bool:
        """Whether the state after so many steps is saved by itself: every so often, and at the end."""
        every = self._config.checkpoint.every
        return steps == self._config.total_steps or bool(every and steps % every == 0)

    def _meta(self, samples: int) -> dict[str, Any]:
        counted = {"samples": samples, "tokens": samples * self._config.seq_len}
        return {**counted, "ledger": self._ledger.digest, **self._about}

    def _noted(self, numbers: dict[str, Any]) -> dict[str, float]:
        """For retention by a metric: the loss of this step, and the held-out loss of its very state. What is
        not finite is left out: no checkpoint is the best by it, and metadata cannot hold it.

        Called where the state is about to be saved, also because the run stops or this worker leaves. Whoever
        goes on from that state does not come back to the step: its line is to be there before that can be.
        """
        self._reporter.flush()
        found = {"loss": self._reporter.last.get("loss"), "eval_loss": numbers.get("eval_loss")}
        return {name: one for name, one in found.items() if one is not None and math.isfinite(one)}

    def _compare(self, index: int, state: State) -> None:
        """Tell the fingerprints of this step where one is due; look at those of the step before.

        Whoever had a part in this step's sum had told its own of the last step by then, so nobody waits; and
        after the last step there is no such sum, so nothing is told. All workers of a replica compute, for
        each holds a part of the arrays; the first of them tells.
        """
        every, run = self._config.check_every, self._run
        if not every or run.alone:
            return
        if index % every == 0 and index > 0:
            with self._unless_unreachable():
                self._judge(index)
        if (index + 1) % every == 0 and index + 1 < self._config.total_steps:
            prints = fingerprints({"params": state["params"], "opt": state["opt"]})
            if run.index == 0:
                self._report = self._report.with_step(index + 1, prints)
                with self._unless_unreachable():
                    run.tell(_CHECK, self._report.encoded())

    @contextmanager
    def _unless_unreachable(self) -> Iterator[None]:
        """Training goes on while the coordinator is away: a comparison left out costs nothing."""
        try:
            yield
        except UnreachableError as error:
            self._run.log("the replicas are not compared this time: %s", error)

    def _judge(self, steps: int) -> None:
        found = verdict(reports_of(self._run.heard(_CHECK), steps))
        if found is None:
            return
        text = f"the replicas differ after step {steps}: {found}"
        teller = self._run.slot - self._run.index  # the worker that told for this replica
        if found.corrupt and teller not in found.corrupt:
            self._run.log("%s; it is left to start again from the others", text)
            return
        raise DivergedError(
            text,
            hint="this worker ends, and starts again from the state of the others; look at its machine"
            if found.corrupt
            else "all end, and start again from the last checkpoint; with three replicas one could be named",
        )


@contextmanager
def _stop_signals(alone: bool) -> Iterator[threading.Event]:
    """Set by SIGTERM or Ctrl-C, once; the next Ctrl-C is one. Under launch the agent hears them instead."""
    stop = threading.Event()
    if not alone or threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def asked(number: int, _: object) -> None:
        stop.set()
        for one, handler in before.items():
            signal.signal(one, handler)

    for number in before:
        signal.signal(number, asked)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
