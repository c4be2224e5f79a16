"""The edge around the policy, with agents that are threads at the other end of real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.errors import DeadlineError, HoldfastError
from holdfast.journal import Journal, read
from holdfast.supervise import messages as m
from holdfast.supervise.conductor import Conductor
from holdfast.supervise.decisions import AgentDown, KillAgent, NodeOffered, Resize, StopAsked
from holdfast.supervise.rules import PolicySettings
from holdfast.supervise.status import RunStatus
from holdfast.supervise.stream import Stream, commands_of, reports_of
from holdfast.wire import ConnectionLost

DEADLINE_S = 20.0
Behaviour = Callable[["FakeAgent"], None]


class FakeAgent:
    """One life of an agent: a thread that does as its behaviour says."""

    def __init__(self, node: int, life: int, sock: socket.socket, behave: Behaviour) -> None:
        self.node = node
        self.life = life
        self.stream: Stream[m.Command] = commands_of(sock)
        self.thread = threading.Thread(target=self._run, args=(behave,), daemon=True)
        self.thread.start()

    def _run(self, behave: Behaviour) -> None:
        try:
            self.say(m.AgentUp(self.node, 1))
            behave(self)
        except (ConnectionLost, DeadlineError):
            pass
        finally:
            self.stream.close()

    def say(self, report: m.Report) -> None:
        self.stream.send(report)

    def next(self) -> m.Command:
        return self.stream.receive(DEADLINE_S)

    def until_shutdown(self) -> m.Shutdown:
        while not isinstance(command := self.next(), m.Shutdown):
            pass
        return command


class FakeAgents:
    """Starts threads; `behave` is given the life of the agent too."""

    def __init__(self, behave: Behaviour) -> None:
        self._behave = behave
        self.lives: dict[int, list[FakeAgent]] = {}
        self.killed: list[int] = []
        self.refuse = 0
        """So many starts fail first."""

    def start(self, node: int) -> Stream[m.Report]:
        if self.refuse:
            self.refuse -= 1
            raise HoldfastError("no such machine", hint="look for it")
        ours, theirs = socket.socketpair()
        lives = self.lives.setdefault(node, [])
        lives.append(FakeAgent(node, len(lives), theirs, self._behave))
        return reports_of(ours)

    def kill(self, node: int) -> None:
        self.killed.append(node)

    def join(self) -> None:
        for lives in self.lives.values():
            for agent in lives:
                agent.thread.join(DEADLINE_S)
                assert not agent.thread.is_alive()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "journal" / "run.jsonl", component="conductor") as journal:
        yield journal


def works(agent: FakeAgent) -> None:
    """Starts whom it is told to; they finish at once."""
    while True:
        command = agent.next()
        if isinstance(command, m.Spawn):
            agent.say(m.WorkerStarted(agent.node, command.worker, 1))
            if command.seat is not None:
                agent.say(m.WorkerActive(agent.node, command.worker, "i", 0, 1))
                agent.say(m.WorkerProgress(agent.node, command.worker, 7, "step", 0.1))
                agent.say(m.WorkerEnded(agent.node, command.worker, m.DONE, 0, 7, "shutdown"))
        elif isinstance(command, m.Shutdown):
            return


def settings(**fields: object) -> PolicySettings:
    return PolicySettings(**{"run": "demo", "replicas": 2, **fields})  # type: ignore[arg-type]


def run_in_thread(conductor: Conductor) -> tuple[threading.Thread, list[int]]:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(conductor.run()), daemon=True)
    thread.start()
    return thread, codes


def status_of(folder: Path) -> RunStatus:
    return msgspec.json.decode((folder / "status.json").read_bytes(), type=RunStatus)


def test_a_run_to_its_end(tmp_path: Path, journal: Journal) -> None:
    agents = FakeAgents(works)
    seen: list[RunStatus] = []
    conductor = Conductor(settings(nodes=2), agents, journal=journal, folder=tmp_path, watcher=seen.append)
    assert conductor.run() == 0
    assert conductor.message == "all steps are done"
    agents.join()
    status = status_of(tmp_path)
    assert (status.state, status.code, status.step, status.run) == ("ended", 0, 7, "demo")
    assert msgspec.structs.replace(status, wall=0.0) == msgspec.structs.replace(seen[-1], wall=0.0)
    assert not list(tmp_path.glob("*.tmp"))
    journal.flush()
    kinds = [type(record.event).__name__ for record in read(journal.path)]
    assert kinds[0] == "RunStarted"
    assert kinds[-1] == "RunEnded"


def test_an_agent_whose_stream_ends_is_seen_gone_and_started_again(tmp_path: Path, journal: Journal) -> None:
    def dies_once(agent: FakeAgent) -> None:
        if agent.life == 0:
            agent.next()  # dies with its first order
        else:
            works(agent)

    agents = FakeAgents(dies_once)
    conductor = Conductor(settings(), agents, journal=journal, folder=tmp_path)
    assert conductor.run() == 0
    assert len(agents.lives[0]) == 2
    assert agents.killed[0] == 0
    journal.flush()
    assert "AgentLost" in [type(record.event).__name__ for record in read(journal.path)]


def test_an_agent_that_cannot_be_started_is_tried_again(tmp_path: Path, journal: Journal) -> None:
    agents = FakeAgents(works)
    agents.refuse = 1
    assert Conductor(settings(), agents, journal=journal, folder=tmp_path).run() == 0


def test_wishes_are_heard_at_once_from_another_thread(tmp_path: Path, journal: Journal) -> None:
    shutdowns: list[m.Shutdown] = []
    seated = threading.Event()

    def waits(agent: FakeAgent) -> None:
        while not isinstance(command := agent.next(), m.Shutdown):
            if isinstance(command, m.Spawn):
                agent.say(m.WorkerStarted(agent.node, command.worker, 1))
                seated.set()
        shutdowns.append(command)

    agents = FakeAgents(waits)
    conductor = Conductor(settings(max_replicas=3), agents, journal=journal, folder=tmp_path)
    thread, codes = run_in_thread(conductor)
    assert seated.wait(DEADLINE_S)
    conductor.ask(Resize(3))
    conductor.ask(NodeOffered(1))
    conductor.ask(StopAsked("SIGTERM"))
    thread.join(DEADLINE_S)
    assert codes == [75]
    assert shutdowns[0].reason == "stopped: SIGTERM; the same command goes on from what is saved"
    assert status_of(tmp_path).replicas == 3
    conductor.ask(StopAsked("too late"))  # nobody minds


def test_a_silent_agent_is_killed_and_replaced(tmp_path: Path, journal: Journal) -> None:
    def silent_once(agent: FakeAgent) -> None:
        if agent.life == 0:
            agent.until_shutdown()  # never comes: its stream is closed
        else:
            works(agent)

    agents = FakeAgents(silent_once)
    fast = settings(agent_dead_s=0.3)
    assert Conductor(fast, agents, journal=journal, folder=tmp_path).run() == 0
    assert agents.killed[0] == 0
    assert any("was silent" in one.text for one in status_of(tmp_path).decisions)


def test_a_death_is_told_once(tmp_path: Path, journal: Journal) -> None:
    """An agent that is gone is ended for something else before the policy has heard of its end."""
    conductor = Conductor(settings(), FakeAgents(works), journal=journal, folder=tmp_path)
    conductor._start(0)
    conductor._drop(0, "its stream is at its end")
    conductor._carry_out([KillAgent(0, "it did not start worker 1")])
    assert list(conductor._pending) == [AgentDown(0, "its stream is at its end")]
    conductor._close()


def test_an_agent_speaks_for_its_own_node_only(tmp_path: Path, journal: Journal) -> None:
    def liar(agent: FakeAgent) -> None:
        agent.say(m.NodePreempted(1 - agent.node, 1.0, "a lie"))
        works(agent)

    conductor = Conductor(settings(nodes=2), FakeAgents(liar), journal=journal, folder=tmp_path)
    assert conductor.run() == 0


def test_a_status_that_cannot_be_written_stops_nothing(tmp_path: Path, journal: Journal) -> None:
    conductor = Conductor(settings(), FakeAgents(works), journal=journal, folder=tmp_path / "not there")
    assert conductor.run() == 0
