"""The workers of a node: started, seated, watched, drained and ended as the conductor says."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, final

from holdfast.journal import Journal, StacksDumped, WorkerExited, WorkerHung, WorkerSpawned
from holdfast.supervise.agent_burials import Undertaker
from holdfast.supervise.agent_config import AgentConfig
from holdfast.supervise.agent_loop import Loop
from holdfast.supervise.agent_worker import Worker
from holdfast.supervise.board import Reading
from holdfast.supervise.logs import Console, last_lines
from holdfast.supervise.messages import (
    CRASHED,
    DONE,
    KILLED,
    OUT_OF_MEMORY,
    PREEMPTED,
    STOPPED,
    Active,
    Drained,
    Leave,
    Report,
    Seat,
    StopRun,
    Take,
    Waiting,
    WorkerActive,
    WorkerDrained,
    WorkerEnded,
    WorkerParked,
    WorkerProgress,
    WorkerStarted,
)
from holdfast.supervise.processes import Exit, may_renice, oom_kills, renice_group
from holdfast.supervise.stacks import Dump, stacks_path
from holdfast.supervise.watch import Verdict

_log = logging.getLogger("holdfast.agent")

_REPORT_S: Final = 0.5
"""Progress is told no more often."""
_TAIL_LINES: Final = 20
_MAX_DETAIL: Final = 2000


@final
class Crew:
    """All workers of a node. Everything here runs on the agent's main thread and never blocks."""

    def __init__(
        self,
        config: AgentConfig,
        loop: Loop,
        report: Callable[[Report], object],
        *,
        journal: Journal,
        undertaker: Undertaker,
        console: Console,
    ) -> None:
        self._config = config
        self._loop = loop
        self._report = report
        self._journal = journal
        self._undertaker = undertaker
        self._console = console
        self._workers: dict[int, Worker] = {}
        self._kill_at: float | None = None
        self._oom_kills = oom_kills()
        self._may_renice = may_renice()
        self._said_nice = False

    def __len__(self) -> int:
        return len(self._workers)

    # ---- what the conductor asks for

    def spawn(self, number: int, seat: Seat | None) -> None:
        """Start a worker; one that cannot be started has ended."""
        node = self._config.node
        trains = any(worker.incarnation for worker in self._workers.values())
        nice = self._niceness() if seat is None or trains else 0
        try:
            worker = Worker(number, self._config, seat=seat, nice=nice)
        except OSError as error:
            _log.error("cannot start worker %d: %s", number, error)
            self._report(WorkerEnded(node, number, CRASHED, 127, -1, "start", f"cannot start it: {error}"))
            return
        self._workers[number] = worker
        self._loop.add(worker.process.fileno(), lambda: self._ended(worker))
        self._loop.add_stream(worker.stream, lambda: self._heard(worker))
        self._journal.append(WorkerSpawned(node, number, worker.process.pid))
        self._report(WorkerStarted(node, number, worker.process.pid))

    def _niceness(self) -> int:
        if self._config.nice and not self._may_renice and not self._said_nice:
            self._said_nice = True
            self._console.say(
                f"[node {self._config.node}] processes warm up at normal priority: it could not be raised "
                "again later (no CAP_SYS_NICE, RLIMIT_NICE below 20)"
            )
        return self._config.nice if self._may_renice else 0

    def activate(self, number: int, seat: Seat) -> None:
        """Give a parked worker a seat."""
        if (worker := self._workers.get(number)) is not None:
            worker.seat = seat
            self._seat(worker)

    def kill(self, number: int, reason: str, cause: str = KILLED) -> None:
        """End a worker and whatever it started, at once."""
        if (worker := self._workers.get(number)) is not None:
            worker.doom = worker.doom or (cause, reason)
            worker.process.kill_group()

    def drain(self, number: int, reason: str) -> None:
        """Let a worker leave at its next step boundary. One that is no member yet is ended."""
        worker = self._workers.get(number)
        if worker is None:
            return
        if worker.incarnation and worker.stream.send(Leave(reason, self._config.notice_s)):
            return
        self.kill(number, reason, PREEMPTED)

    def stop(self, reason: str, grace_s: float) -> None:
        """Let all members save and go, within `grace_s`; end the others. Once more may shorten the time."""
        kill_at = time.monotonic() + grace_s
        if self._kill_at is None:
            for number, worker in self._workers.items():
                if not worker.incarnation or not worker.stream.send(StopRun(reason, grace_s)):
                    self.kill(number, reason)
        self._kill_at = min(kill_at, self._kill_at or kill_at)

    def kill_all(self, reason: str, cause: str = KILLED) -> None:
        """End all at once."""
        for number in self._workers:
            self.kill(number, reason, cause)

    # ---- what workers say

    def _heard(self, worker: Worker) -> None:
        for word in worker.stream.take():
            self._word(worker, word)
        if worker.stream.ended is not None:
            # Its end is seen through the process; a worker may close the socket and live on.
            self._loop.remove(worker.stream.fileno())

    def _word(self, worker: Worker, word: object) -> None:
        node = self._config.node
        if isinstance(word, Waiting):
            worker.waits = True
            if worker.seat is None:
                self._report(WorkerParked(node, worker.number))
            self._seat(worker)
        elif isinstance(word, Active):
            worker.incarnation, worker.slot = word.incarnation, word.slot
            self._report(WorkerActive(node, worker.number, word.incarnation, word.slot, word.generation))
        elif isinstance(word, Drained):
            worker.drained = True
            self._report(WorkerDrained(node, worker.number))

    def _seat(self, worker: Worker) -> None:
        if worker.seat is None or not worker.waits or worker.sat_down:
            return
        worker.sat_down = True
        config = self._config
        worker.slot = worker.seat.replica * config.workers_per_replica + worker.seat.index
        worker.stream.send(Take(worker.seat, config.replicas, config.workers_per_replica, config.lanes))
        if worker.nice:
            renice_group(worker.process.pid)

    # ---- what is seen of them

    def tick(self, now: float) -> None:
        """Look at every worker."""
        if self._kill_at is not None and now >= self._kill_at:
            self.kill_all("the time to save and go is over")
        for worker in list(self._workers.values()):
            self._show(worker)
            reading = worker.reading()
            if worker.dump is not None:
                self._dumped(worker, worker.dump, now)
            elif worker.doom is None and (facts := worker.process.facts()) is not None:
                verdict = worker.watch.look(reading, facts, now)
                if verdict is not None:
                    self._condemn(worker, reading, verdict, now)
            told = (reading.step, reading.phase)
            if told != worker.told and now - worker.told_at >= _REPORT_S:
                worker.told, worker.told_at = told, now
                median = reading.median_step_s
                self._report(WorkerProgress(self._config.node, worker.number, *told, median))

    def _condemn(self, worker: Worker, reading: Reading, verdict: Verdict, now: float) -> None:
        """Name the culprit and have its stacks written down; then it is ended."""
        since_s = now - verdict.since
        slot = -1 if worker.slot is None else worker.slot
        where = f"step {reading.step + 1}, phase {reading.phase!r}"
        title = f"{worker.name} hangs in {where}: {verdict.detail}"
        worker.doom = (verdict.cause, verdict.detail)
        # Where it hung: the signal for its stacks may make it go on for a moment.
        worker.hung_at = reading
        self._console.say(f"[node {self._config.node}] {title}")
        _log.warning("%s", title)
        self._journal.append(
            WorkerHung(
                node=self._config.node,
                worker=worker.number,
                pid=worker.process.pid,
                slot=slot,
                cause=verdict.cause,
                phase=reading.phase,
                step=reading.step,
                seconds=since_s,
                reason=verdict.detail,
            )
        )
        path = stacks_path(self._config.folder, worker.process.pid)
        stopped = verdict.cause == STOPPED
        worker.dump = Dump(worker.process, path, title, stopped=stopped, now=now)
        self._dumped(worker, worker.dump, now)

    def _dumped(self, worker: Worker, dump: Dump, now: float) -> None:
        if dump.done(now):
            dump.close()
            worker.dump = None
            self._journal.append(StacksDumped(self._config.node, worker.number, dump.path))
            if worker.doom is not None:
                worker.doom = (worker.doom[0], f"{worker.doom[1]}; its stacks: {dump.path}")
            worker.process.kill_group()

    def _ended(self, worker: Worker) -> None:
        # The group first: once the process is reaped, its number may belong to somebody else.
        worker.process.kill_group()
        exit_ = worker.process.ended()
        if exit_ is None:
            return
        code = exit_.code or 0
        if worker.incarnation:
            self._undertaker.bury(worker.incarnation, f"worker {worker.number}: {exit_}")
        if worker.stream.ended is None:
            self._heard(worker)
        self._show(worker, all_=True)
        reading = worker.hung_at or worker.reading()
        cause, detail = self._cause(worker, exit_)
        node, number = self._config.node, worker.number
        self._report(WorkerEnded(node, number, cause, code, reading.step, reading.phase, detail))
        pid = worker.process.pid
        self._journal.append(
            WorkerExited(node, number, pid, cause, code, reading.step, reading.phase, detail)
        )
        self._loop.remove(worker.process.fileno())
        self._loop.remove(worker.stream.fileno())
        del self._workers[number]
        if cause not in (DONE, KILLED, PREEMPTED):
            self._lament(worker, f"{worker.name} {cause}: {detail}")
        worker.close()

    def _cause(self, worker: Worker, exit_: Exit) -> tuple[str, str]:
        code = exit_.code
        if worker.doom is not None:
            return worker.doom
        if worker.drained:
            return PREEMPTED, f"drained, {exit_}"
        if code == 0:
            return DONE, str(exit_)
        if code == -9 and (kills := oom_kills()) is not None and kills > (self._oom_kills or 0):
            self._oom_kills = kills
            return OUT_OF_MEMORY, "killed by the kernel for want of memory"
        said = last_lines(worker.log, 1)
        return CRASHED, f"{exit_}: {said[0]}"[:_MAX_DETAIL] if said else str(exit_)

    # ---- what people see

    def _show(self, worker: Worker, *, all_: bool = False) -> None:
        slots = self._config.log_slots
        if worker.tail is None or worker.slot is None or (slots is not None and worker.slot not in slots):
            return
        for line in worker.tail.lines(all_=all_):
            self._console.say(f"[{worker.slot}] {line}")

    def _lament(self, worker: Worker, what: str) -> None:
        lines = last_lines(worker.log, _TAIL_LINES)
        self._console.say(f"[node {self._config.node}] {what}")
        for line in lines:
            self._console.say(f"    | {line}")
        self._console.say(f"    all of it: {worker.log}")

    def close(self) -> None:
        """End whoever is left, and let go of all."""
        self.kill_all("the agent ends")
        for worker in self._workers.values():
            self._loop.remove(worker.process.fileno())
            self._loop.remove(worker.stream.fileno())
            worker.close()
        self._workers.clear()
