"""The workers of a node: started, seated, watched, drained and ended as the conductor says."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, final

from holdfast.errors import HoldfastError
from holdfast.journal import Journal, StacksDumped, WorkerExited, WorkerFenced, WorkerHung, WorkerSpawned
from holdfast.supervise.agent_burials import Undertaker
from holdfast.supervise.agent_config import AgentConfig
from holdfast.supervise.agent_loop import Loop
from holdfast.supervise.agent_worker import Worker
from holdfast.supervise.board import Reading
from holdfast.supervise.decisions import NO_RETRY_CODE
from holdfast.supervise.lives import key_of
from holdfast.supervise.logs import Console, last_error, last_lines
from holdfast.supervise.memory_kills import MemoryKills
from holdfast.supervise.messages import (
    CRASHED,
    DONE,
    FENCED,
    HUNG,
    KILLED,
    OUT_OF_MEMORY,
    PREEMPTED,
    STALLED,
    STOPPED,
    Active,
    Drained,
    Failed,
    Finished,
    Leave,
    Remark,
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
from holdfast.supervise.precedence import is_hushed, is_nice
from holdfast.supervise.processes import Exit, may_renice, oom_kills, renice_group, renice_session
from holdfast.supervise.stacks import Dump, stacks_path
from holdfast.supervise.watch import Verdict

_log = logging.getLogger("holdfast.agent")

_REPORT_S: Final = 0.5
"""Progress is told no more often."""
_BLIND_S: Final = 1.0
"""Looks later than this by so much: this process did not run, and perhaps no other did."""
_TAIL_LINES: Final = 20
_MAX_DETAIL: Final = 2000


def _is_late(worker: Worker, exit_: Exit) -> bool:
    """Whether it hung or fell without a word. With an exit code, its program says that it failed."""
    if worker.doom is not None:
        return worker.doom[0] in (HUNG, STALLED, STOPPED)
    return exit_.code is not None and exit_.code < 0


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
        self._looked_at = time.monotonic()
        self._memory_kills = MemoryKills(oom_kills())
        self.successor = False
        """Whether this agent follows one that was lost, and all its workers with it."""
        self._may_renice = may_renice()
        self._said_nice = False
        self._lamented: dict[tuple[str, ...], str] = {}

    def __len__(self) -> int:
        return len(self._workers)

    def pids(self) -> dict[int, int]:
        """The numbers of the workers by process."""
        return {worker.process.pid: number for number, worker in self._workers.items()}

    def members(self) -> dict[str, int]:
        """The numbers of those that have come into the run, by their keys."""
        node, workers = self._config.node, self._workers.items()
        return {key_of(node, one.incarnation): number for number, one in workers if one.incarnation}

    # ---- what the conductor asks for

    def spawn(self, number: int, seat: Seat | None) -> None:
        """Start a worker; one that cannot be started has ended."""
        node = self._config.node
        others = [worker.standing for worker in self._workers.values()]
        replica = None if seat is None else seat.replica
        nice = self._niceness() if is_nice(replica, others, successor=self.successor) else 0
        try:
            worker = Worker(number, self._config, seat=seat, nice=nice)
        except OSError as error:
            _log.error("cannot start worker %d: %s", number, error)
            self._report(WorkerEnded(node, number, CRASHED, 127, -1, "start", f"cannot start it: {error}"))
            return
        except HoldfastError as error:
            _log.error("worker %d cannot be: %s", number, error)
            self._report(WorkerEnded(node, number, CRASHED, NO_RETRY_CODE, -1, "start", error.message))
            return
        self._workers[number] = worker
        self._loop.add(worker.process.fileno(), lambda: self._ended(worker))
        self._loop.add_stream(worker.stream, lambda: self._heard(worker))
        self._journal.append(WorkerSpawned(node, number, worker.process.pid))
        self._report(WorkerStarted(node, number, worker.process.pid))
        self._hush()

    def _hush(self) -> None:
        """Let those who warm up for later step back while somebody is on the way to its first step."""
        warming = [worker for worker in self._workers.values() if worker.warming]
        hushed = bool(warming) and is_hushed(worker.standing for worker in self._workers.values())
        for worker in warming:
            if worker.hushed != hushed:
                worker.hushed = hushed
                renice_session(worker.process.pid, worker.nice if hushed else 0)

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
            worker.leaves = True
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
        elif isinstance(word, Finished):
            worker.finished = True
        elif isinstance(word, Failed):
            worker.error = word.reason[:_MAX_DETAIL]
        elif isinstance(word, Remark):
            self._console.say(f"[node {node}] {word.text[:_MAX_DETAIL]}")

    def _seat(self, worker: Worker) -> None:
        if worker.seat is None or not worker.waits or worker.sat_down:
            return
        worker.sat_down = True
        worker.watch.seated(time.monotonic())
        config = self._config
        worker.slot = worker.seat.replica * config.workers_per_replica + worker.seat.index
        size = (config.replicas, config.workers_per_replica)
        worker.stream.send(Take(worker.seat, *size, config.lanes, config.wire_dtype))
        if worker.nice:
            renice_group(worker.process.pid)
        if worker.hushed:
            worker.hushed = False
            renice_session(worker.process.pid, 0)
        self._hush()

    # ---- what is seen of them

    def tick(self, now: float) -> None:
        """Look at every worker."""
        if self._kill_at is not None and now >= self._kill_at:
            self.kill_all("the time to save and go is over")
        unseen = now - self._looked_at - self._config.tick_s - _BLIND_S
        self._looked_at = now
        workers = list(self._workers.values())
        readings = {worker.number: worker.reading() for worker in workers}
        for worker in workers:
            if unseen > 0:
                worker.watch.unseen(unseen)
            self._show(worker)
            reading = readings[worker.number]
            if worker.dump is not None:
                self._dumped(worker, worker.dump, now)
            elif worker.doom is None and (facts := worker.process.facts()) is not None:
                mates = [readings[one.number].phase for one in workers if one.is_mate_of(worker)]
                verdict = worker.watch.look(reading, facts, now, mates)
                if verdict is not None:
                    self._condemn(worker, reading, verdict, now)
            told = (reading.step, reading.phase)
            if told != worker.told and now - worker.told_at >= _REPORT_S:
                worker.told, worker.told_at = told, now
                median = reading.median_step_s
                self._report(WorkerProgress(self._config.node, worker.number, *told, median))
        self._hush()

    def _condemn(self, worker: Worker, reading: Reading, verdict: Verdict, now: float) -> None:
        """Name the culprit and have its stacks written down; then it is ended."""
        since_s = now - verdict.since
        slot = -1 if worker.slot is None else worker.slot
        where = f"step {reading.step + 1}, phase {reading.phase!r}"
        title = f"{worker.name} hangs in {where}: {verdict.detail}"
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
        self._doom(worker, reading, verdict.cause, verdict.detail, title, now)

    def expel(self, number: int, seconds: float, now: float) -> None:
        """End a worker that the coordinator declared dead so long ago: others have its lanes."""
        worker = self._workers.get(number)
        if worker is None or worker.doom is not None or worker.drained or worker.finished:
            return
        reading = worker.reading()
        if reading.phase == "shutdown":
            return  # it has left the run, and that phase has its own deadline
        slot = -1 if worker.slot is None else worker.slot
        pid, node = worker.process.pid, self._config.node
        detail = f"it went on for {seconds:.1f} s after the coordinator had declared it dead"
        title = f"{worker.name} is out of the run in step {reading.step + 1}: {detail}"
        self._journal.append(
            WorkerFenced(node, number, pid, slot, reading.phase, reading.step, seconds=seconds)
        )
        self._doom(worker, reading, FENCED, detail, title, now)

    def _doom(
        self, worker: Worker, reading: Reading, cause: str, detail: str, title: str, now: float
    ) -> None:
        worker.doom = (cause, detail)
        # Where it hung: the signal for its stacks may make it go on for a moment.
        worker.hung_at = reading
        self._console.say(f"[node {self._config.node}] {title}")
        path = stacks_path(self._config.folder, worker.process.pid)
        worker.dump = Dump(worker.process, path, title, stopped=cause == STOPPED, now=now)
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
        cause, detail = self._cause(worker, exit_, reading)
        node, number = self._config.node, worker.number
        told = 0 if cause == DONE else code
        self._report(WorkerEnded(node, number, cause, told, reading.step, reading.phase, detail))
        pid = worker.process.pid
        self._journal.append(
            WorkerExited(node, number, pid, cause, code, reading.step, reading.phase, detail)
        )
        self._loop.remove(worker.process.fileno())
        self._loop.remove(worker.stream.fileno())
        del self._workers[number]
        if cause == DONE and (code or not worker.incarnation):
            self._console.say(f"[node {node}] {worker.name}: {detail}")
        if cause not in (DONE, KILLED, PREEMPTED):
            self._lament(worker, cause, detail)
        worker.close()

    def _cause(self, worker: Worker, exit_: Exit, reading: Reading) -> tuple[str, str]:
        code = exit_.code
        if worker.finished and _is_late(worker, exit_):
            # The work is done and saved; another process would only do its end over.
            return DONE, f"all its steps were done; then {exit_}" if worker.doom is None else worker.doom[1]
        if worker.doom is not None:
            return worker.doom
        if worker.drained or (worker.leaves and code == 0 and not worker.finished):
            return PREEMPTED, f"drained, {exit_}"
        if code == 0:
            return self._left(worker, reading)
        if code == -9 and self._memory_kills.claims(oom_kills(), now=time.monotonic()):
            return OUT_OF_MEMORY, "killed by the kernel for want of memory"
        if code is None or code < 0:
            return CRASHED, str(exit_)  # what it printed last has nothing to do with that
        said = last_error(last_lines(worker.log, _TAIL_LINES, since=worker.log_from))
        return CRASHED, worker.error or (f"{exit_}: {said}"[:_MAX_DETAIL] if said else str(exit_))

    def _left(self, worker: Worker, reading: Reading) -> tuple[str, str]:
        """What an exit code of 0 means of one that nobody told to leave."""
        if worker.finished or self._kill_at is not None:
            return DONE, str(Exit(0))
        if worker.incarnation:
            return CRASHED, f"ended with 0 in step {max(0, reading.step)} before its steps were done"
        call = "run.restore()" if worker.sat_down else "holdfast.join()"
        return DONE, f"ended with 0 and without {call}: it has trained nothing"

    # ---- what people see

    def _show(self, worker: Worker, *, all_: bool = False) -> None:
        if worker.tail is None or not self._shows(worker):
            return
        for line in worker.tail.lines(all_=all_):
            self._console.say(f"[{worker.slot}] {line}")

    def _shows(self, worker: Worker) -> bool:
        """Whether people see what it prints."""
        slots = self._config.log_slots
        return worker.slot is not None and (slots is None or worker.slot in slots)

    def _lament(self, worker: Worker, cause: str, detail: str) -> None:
        """Say how a worker failed, with its last lines where they have not been shown."""
        seen = self._shows(worker)
        why = "" if seen and detail == worker.error else f": {detail}"
        self._console.say(f"[node {self._config.node}] {worker.name} {cause}{why}")
        if not seen:
            lines = tuple(last_lines(worker.log, _TAIL_LINES, since=worker.log_from))
            if before := self._lamented.get(lines):
                self._console.say(f"    its last lines are those of {before}")
            else:
                for line in lines:
                    self._console.say(f"    | {line}")
            if lines:
                self._lamented = {lines: worker.name}
        self._console.say(f"    all of it: {worker.log}")

    def close(self) -> None:
        """End whoever is left, and let go of all."""
        self.kill_all("the agent ends")
        for worker in self._workers.values():
            self._loop.remove(worker.process.fileno())
            self._loop.remove(worker.stream.fileno())
            worker.close()
        self._workers.clear()
