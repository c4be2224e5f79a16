"""`python -m holdfast.supervise.agent --config-fd N --stream-fd M`: the conductor's hands and eyes on a node.

One thread waits on everything: the conductor's stream, the ends of processes, the workers' control sockets,
signals, and a tick for what nobody tells (boards, logs). It decides nothing about failures; it reports them.
Once the conductor's stream is at its end, the workers save and go, the parts end, and so does the agent.
SIGTERM means that the node goes away: the conductor is told and has the workers leave.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import sys
import time
from types import FrameType
from typing import Final, final

from holdfast.clock import Deadline
from holdfast.errors import HoldfastError, LeaseError, StorageError
from holdfast.journal import Journal, PartRestarted, PartStarted
from holdfast.supervise import messages as m
from holdfast.supervise.agent_burials import Undertaker
from holdfast.supervise.agent_config import AgentConfig, forget_vault, name_neighbours, read_config
from holdfast.supervise.agent_crew import Crew
from holdfast.supervise.agent_loop import Loop
from holdfast.supervise.agent_worker import WORKER
from holdfast.supervise.lives import Lives, prefix_of
from holdfast.supervise.logs import Console, last_lines
from holdfast.supervise.parts import COORDINATOR, KIND, Part, recipes
from holdfast.supervise.processes import end_marked
from holdfast.supervise.stream import Stream, commands_of, inherited

_log = logging.getLogger("holdfast.agent")

_IDLE_S: Final = 0.25
_ENDING_S: Final = 0.02
_HURRY_S: Final = 5.0
"""What the vault gets where no grace is given."""
_COORDINATOR_S: Final = 10.0
"""What the coordinator gets to end."""
_MARGIN_S: Final = 0.2
"""The share of a notice that is kept for the vault."""
_TAIL_LINES: Final = 5
_CANNOT: Final = 78


@final
class Agent:
    """One node's agent; `run` it once, on the main thread. Fails: LeaseError if the node has one already."""

    def __init__(self, config: AgentConfig, stream: Stream[m.Command], console: Console) -> None:
        self._config = config
        self._stream = stream
        self._console = console
        self._lease = _locked(config.lease, config.lease_s)
        self._loop = Loop()
        self._journal = Journal(config.journal, component=f"agent {config.node}")
        self._undertaker = Undertaker(
            f"file:{config.discovery}",
            run=config.run,
            token=config.token.encode(),
            name=f"agent of node {config.node}",
            watched=prefix_of(config.node),
        )
        self._lives = Lives()
        self._crew = Crew(
            config,
            self._loop,
            self._tell,
            journal=self._journal,
            undertaker=self._undertaker,
            console=console,
        )
        self._parts = [Part(recipe, config) for recipe in recipes(config)]
        self._signals: list[int] = []
        self._beat_at = 0.0
        self._ends_at: float | None = None
        self._parts_until = 0.0
        self._hurry = False
        self._stopping = False
        self._code = 0
        self._gone_at: float | None = None
        """When the node will be gone, as far as is known."""

    # ---- the whole life

    def run(self) -> int:
        """Serve until told to end; gives the exit code. Blocks: as long as that takes."""
        wake = self._catch_signals()
        try:
            # Workers of a former agent died with it; what they had started may not have.
            end_marked({**self._config.marks, KIND: WORKER})
            with contextlib.suppress(OSError):  # whom a former agent was told to name
                os.unlink(self._config.neighbourhood)
            adopted = tuple(part.name for part in self._parts if self._begin(part))
            self._crew.successor = bool(adopted)
            self._loop.add_stream(self._stream, self._commands)
            self._tell(m.AgentUp(self._config.node, os.getpid(), adopted))
            next_tick = time.monotonic()
            while not self._over():
                self._loop.turn(next_tick - time.monotonic())
                if (now := time.monotonic()) >= next_tick:
                    self._tick(now)
                    next_tick = now + self._pause_s()
            return self._code
        finally:
            self._close(wake)

    def _pause_s(self) -> float:
        if self._ends_at is not None:
            return _ENDING_S
        return self._config.tick_s if len(self._crew) else _IDLE_S

    def _tell(self, report: m.Report) -> bool:
        return self._stream.send(report)

    def _commands(self) -> None:
        for command in self._stream.take():
            self._obey(command)
        if self._stream.ended is not None:
            self._loop.remove(self._stream.fileno())
            if self._ends_at is None:
                _log.warning("the launch process is gone (%s): the run stops", self._stream.ended)
                self._end("the launch process is gone", self._config.grace_s, 0)

    def _obey(self, command: m.Command) -> None:
        if isinstance(command, m.Spawn):
            if self._ends_at is None:
                self._crew.spawn(command.worker, command.seat)
        elif isinstance(command, m.Activate):
            self._crew.activate(command.worker, command.seat)
        elif isinstance(command, m.Kill):
            self._crew.kill(command.worker, command.reason)
        elif isinstance(command, m.Drain):
            self._crew.drain(command.worker, command.reason)
        elif isinstance(command, m.KeepCopies):
            self._keep_copies(command.nodes)
        else:
            self._end(command.reason, command.grace_s, command.code)

    def _keep_copies(self, nodes: tuple[int, ...]) -> None:
        """Tell the vault whose states to keep copies of."""
        try:
            name_neighbours(self._config, nodes)
        except OSError as error:
            _log.error("the vault cannot be told to keep copies of nodes %s: %s", nodes, error)

    def _tick(self, now: float) -> None:
        for number in self._taken_signals():
            self._signalled(number, now)
        if now - self._beat_at >= self._config.beat_s:
            self._beat_at = now
            self._tell(m.AgentBeat(self._config.node))
        self._crew.tick(now)
        self._end_zombies(now)
        for part in self._parts:
            if part.tick(now):
                self._console.say(
                    f"[node {self._config.node}] the {part.name} was stopped (SIGSTOP); it goes on"
                )
            if part.restart_at is not None and now >= part.restart_at and not self._stopping:
                self._start(part)
        if self._gone_at is not None and self._ends_at is None:
            self._leave_node(now, self._gone_at)
        if self._ends_at is not None and not len(self._crew):
            self._stop_parts(now)

    def _end_zombies(self, now: float) -> None:
        """End workers that the coordinator has declared dead and that go on."""
        pids = self._crew.pids()
        for changed in self._undertaker.taken():
            self._lives.take_in(changed, pids, self._crew.members(), now=now)
        for worker, seconds in self._lives.overdue(pids, self._config.fenced_s, now=now):
            self._crew.expel(worker, seconds, now)

    # ---- signals

    def _catch_signals(self) -> tuple[int, int]:
        source, sink = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        self._loop.add(source, lambda: self._woken(source))
        return source, sink

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _woken(self, source: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(source, 1024)
        for number in self._taken_signals():
            self._signalled(number, time.monotonic())

    def _taken_signals(self) -> list[int]:
        taken, self._signals = self._signals, []
        return taken

    def _signalled(self, number: int, now: float) -> None:
        if number == signal.SIGHUP or self._ends_at is not None:
            return
        name = signal.Signals(number).name
        if self._gone_at is not None:
            self._gone_at = now
            self._end(f"a second {name}", 0.0, 0)
            return
        self._gone_at = now + self._config.notice_s
        self._console.say(f"[node {self._config.node}] {name}: the node goes away")
        self._tell(m.NodePreempted(self._config.node, self._config.notice_s, name))

    def _leave_node(self, now: float, gone_at: float) -> None:
        """After a notice: go once all workers have, or when the rest of the time is the vault's."""
        late = now >= gone_at - _MARGIN_S * self._config.notice_s
        if late:
            self._crew.kill_all("the notice is over", m.PREEMPTED)
        # The node of the coordinator stays for the others, to the end of its notice.
        if late or (not len(self._crew) and not self._config.hosts_coordinator):
            self._end("the node goes away", 0.0, 0)

    # ---- parts

    def _begin(self, part: Part) -> bool:
        try:
            adopted = part.begin()
        except OSError as error:
            raise StorageError.from_os(error, doing=f"start the {part.name} with", path=part.log) from error
        self._watch(part)
        assert part.process is not None
        self._journal.append(PartStarted(self._config.node, part.name, part.process.pid, adopted))
        return adopted

    def _watch(self, part: Part) -> None:
        if part.process is not None:
            self._loop.add(part.process.fileno(), lambda: self._part_ended(part))

    def _part_ended(self, part: Part) -> None:
        process = part.process
        exit_ = None if process is None else process.ended()
        if process is None or exit_ is None:
            return
        self._loop.remove(process.fileno())
        if self._stopping:
            part.forget()
            return
        reason = part.lost(exit_, time.monotonic())
        self._console.say(f"[node {self._config.node}] the {part.name} is gone: {reason}")
        for line in last_lines(part.log, _TAIL_LINES) if exit_.code is not None and exit_.code > 0 else ():
            self._console.say(f"    | {line}")
        self._tell(m.PartLost(self._config.node, part.name, reason))
        if part.restart_at is not None and part.restart_at <= time.monotonic():
            self._start(part)

    def _start(self, part: Part) -> None:
        try:
            part.start()
        except OSError as error:
            _log.error("cannot start the %s: %s", part.name, error)
            part.restart_at = time.monotonic() + 1.0
            return
        self._watch(part)
        assert part.process is not None
        self._journal.append(PartRestarted(self._config.node, part.name, part.process.pid, part.reason))

    # ---- the end

    def _end(self, reason: str, grace_s: float, code: int) -> None:
        self._code = self._code or code
        self._ends_at = time.monotonic() + grace_s
        self._hurry = self._hurry or grace_s == 0.0
        self._crew.stop(reason, grace_s)
        if not len(self._crew):
            self._stop_parts(time.monotonic())

    def _stop_parts(self, now: float) -> None:
        """Vaults first: what they commit, they agree on through the coordinator."""
        if not self._stopping:
            self._stopping = True
            self._parts_until = now + self._config.flush_s
        if self._hurry:
            # A node that goes away is there until then, and the vault may use all of that.
            self._parts_until = min(self._parts_until, max(now + _HURRY_S, self._gone_at or now))
            self._hurry = False
        flush_s = max(0.0, self._parts_until - now)
        others = [part for part in self._parts if part.name != COORDINATOR]
        for part in others:
            part.stop(now, flush_s)
        if any(part.process is not None for part in others):
            return
        for part in self._parts:
            if part.name == COORDINATOR and (now >= self._parts_until or self._alone()):
                self._undertaker.close()
                part.stop(now, _COORDINATOR_S)

    def _alone(self) -> bool:
        """Whether no vault or agent of another node needs the coordinator any more."""
        if self._config.nodes == 1:
            return True
        self._undertaker.count_sessions()
        return self._undertaker.sessions == 0

    def _over(self) -> bool:
        return self._stopping and all(part.process is None for part in self._parts)

    def _close(self, wake: tuple[int, int]) -> None:
        self._crew.close()
        end_marked({**self._config.marks, KIND: WORKER})
        self._undertaker.close()
        self._journal.close()
        signal.set_wakeup_fd(-1)
        self._loop.close()
        for fd in wake:
            os.close(fd)
        for part in self._parts:
            part.forget()
        if self._stopping:
            forget_vault(self._config.root)
            # Nobody needs the lease any more: all who looked at it have ended.
            shutil.rmtree(self._config.root, ignore_errors=True)
        os.close(self._lease)
        # The last of all: to the conductor the end of the stream is the end of the agent.
        self._stream.drain(1.0)
        self._stream.close()


def _locked(path: str, timeout_s: float) -> int:
    """The lease, taken. Blocks: until an earlier agent of the node has ended. Fails: LeaseError.

    Parts of the run look at it now and then, which takes it for a moment.
    """
    deadline = Deadline(timeout_s)
    while (fd := _try_lock(path)) is None:
        if deadline.expired():
            raise LeaseError(
                f"{path} is held by another agent", hint="a node of a run has one agent; end the other one"
            )
        time.sleep(0.005)
    return fd


def _try_lock(path: str) -> int | None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    # The folder goes with an agent that ends: a lock on a file that is not there any more is none.
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    os.close(fd)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="holdfast.supervise.agent", description=__doc__)
    parser.add_argument("--config-fd", type=int, required=True, help="an inherited descriptor: the config")
    parser.add_argument("--stream-fd", type=int, required=True, help="an inherited socket: the conductor")
    options = parser.parse_args()
    logging.basicConfig(format="holdfast agent: %(message)s", level=logging.WARNING)
    try:
        config = read_config(options.config_fd)
        stream = commands_of(inherited(options.stream_fd))
        return Agent(config, stream, Console(sys.stdout.fileno())).run()
    except HoldfastError as error:
        print(f"error: {error}", file=sys.stderr)
        return _CANNOT


if __name__ == "__main__":
    sys.exit(main())
