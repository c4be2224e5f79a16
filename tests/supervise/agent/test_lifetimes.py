"""Who lives and dies with whom: workers with their agent, parts through it; nothing is left in the end."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from holdfast.coord import CoordClient
from holdfast.journal import PartRestarted, PartStarted, read
from holdfast.supervise.agent_config import AgentConfig
from holdfast.supervise.messages import (
    AgentUp,
    PartLost,
    Seat,
    Shutdown,
    Spawn,
    WorkerEnded,
    WorkerProgress,
    WorkerStarted,
)
from tests.supervise.agent.agent_process import (
    TIMEOUT_S,
    TOKEN,
    AgentProcess,
    await_end,
    config_of,
    living,
)

pytestmark = pytest.mark.process

SEAT = Seat(0, 0, 1)


def part(config: AgentConfig, name: str) -> int:
    """The pid of a part that lives. Blocks: until there is one."""
    ends = time.monotonic() + TIMEOUT_S
    while time.monotonic() < ends:
        if found := living(config.folder, HOLDFAST_PART=name):
            return found[0]
        time.sleep(0.01)
    raise AssertionError(f"no {name}")


def await_path(path: Path) -> None:
    ends = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < ends, f"no {path}"
        time.sleep(0.01)


def parts_stand(config: AgentConfig) -> tuple[int, int]:
    """The pids of coordinator and vault, once both can be used."""
    await_path(Path(config.discovery))
    await_path(Path(config.vault_socket))
    return part(config, "coordinator"), part(config, "vault")


def session(config: AgentConfig) -> CoordClient:
    return CoordClient(f"file:{config.discovery}", run="demo", token=TOKEN.encode(), connect_timeout_s=30.0)


def test_workers_die_with_their_agent_and_parts_are_adopted_by_the_next(tmp_path: Path) -> None:
    config = config_of(tmp_path, "offspring", vault=True, orphan_s=30.0)
    with AgentProcess(config) as first:
        assert first.expect(AgentUp).parts == ()
        first.tell(Spawn(1, SEAT))
        worker = first.expect(WorkerStarted).pid
        first.active(1)
        offspring = int(first.log(1).partition("offspring ")[2].split()[0])
        pids = parts_stand(config)
        first.kill()
        await_end(worker)
        with AgentProcess(config) as second:
            assert second.expect(AgentUp).parts == ("coordinator", "vault")
            assert parts_stand(config) == pids
            # What the worker had started did not die with it; the next agent sees to that.
            await_end(offspring)
            second.tell(Spawn(2, SEAT))
            second.active(2)
            second.tell(Shutdown("over", 10.0))
            assert second.ended() == 0
        for pid in pids:
            await_end(pid)
        assert living(tmp_path) == []
        adopted = [e.event for e in read(config.journal) if isinstance(e.event, PartStarted)]
        assert [one.adopted for one in adopted] == [False, False, True, True]


def test_parts_of_other_settings_are_not_adopted(tmp_path: Path) -> None:
    with AgentProcess(config_of(tmp_path)) as first:
        first.expect(AgentUp)
        old = part(first.config, "coordinator")
        first.kill()
        changed = config_of(tmp_path, coordinator={"min_size": 1, "max_size": 7})
        with AgentProcess(changed) as second:
            assert second.expect(AgentUp).parts == ()
            await_end(old)
            second.tell(Shutdown("over", 1.0))
            assert second.ended() == 0


def test_parts_without_an_agent_end_after_a_while(tmp_path: Path) -> None:
    config = config_of(tmp_path, vault=True, orphan_s=0.5)
    with AgentProcess(config) as agent:
        agent.expect(AgentUp)
        pids = parts_stand(config)
        agent.kill()
        for pid in pids:
            await_end(pid)
        assert living(tmp_path) == []
        assert not Path(config.discovery).exists()
        assert not Path(config.vault_socket).exists()


@pytest.mark.parametrize("name", ["coordinator", "vault"])
def test_a_part_that_dies_comes_back_and_training_goes_on(name: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, vault=True)
    with AgentProcess(config) as agent:
        agent.tell(Spawn(1, SEAT))
        agent.active(1)
        pids = dict(zip(("coordinator", "vault"), parts_stand(config), strict=True))
        place = Path(config.discovery).read_text()
        step = agent.expect(WorkerProgress).step
        os.kill(pids[name], signal.SIGKILL)
        lost = agent.expect(PartLost)
        assert (lost.part, "SIGKILL" in lost.reason) == (name, True)
        assert part(config, name) != pids[name]
        agent.expect(WorkerProgress, lambda one: one.step > step + 20)
        with session(config) as client:
            ends = time.monotonic() + TIMEOUT_S
            while [one.slot for one in client.status().members if one.state == "alive"] != [0]:
                assert time.monotonic() < ends
        # It listens where it did before: clients need not look for it.
        assert Path(config.discovery).read_text() == place
        agent.tell(Shutdown("over", 10.0))
        assert agent.expect(WorkerEnded).code == 0
        assert agent.ended() == 0
        events = [record.event for record in read(config.journal)]
        assert [one.part for one in events if isinstance(one, PartRestarted)] == [name]


def test_when_the_launch_process_is_gone_workers_save_and_everything_ends(tmp_path: Path) -> None:
    config = config_of(tmp_path, vault=True)
    with AgentProcess(config) as agent:
        agent.tell(Spawn(1, SEAT))
        agent.tell(Spawn(2))
        agent.active(1)
        agent.stream.close()
        assert agent.ended() == 0
        assert "saved and stopped: the launch process is gone" in agent.log(1)
        assert living(tmp_path) == []


@pytest.mark.parametrize("stopped", [False, True])
def test_who_does_not_go_in_time_is_ended(stopped: bool, tmp_path: Path) -> None:
    config = config_of(tmp_path, "spin")
    with AgentProcess(config) as agent:
        agent.tell(Spawn(1, SEAT))
        agent.active(1)
        if stopped:
            os.kill(part(config, "worker"), signal.SIGSTOP)
        agent.tell(Shutdown("over", 0.5))
        assert agent.expect(WorkerEnded).code == -9
        assert agent.ended() == 0
        assert living(tmp_path) == []


def test_a_node_has_one_agent(tmp_path: Path) -> None:
    with AgentProcess(config_of(tmp_path)) as first:
        first.expect(AgentUp)
        with AgentProcess(config_of(tmp_path)) as second:
            assert second.ended() == 78
            assert "is held by another agent" in second.said()


def test_nothing_remains_of_a_run(tmp_path: Path) -> None:
    config = config_of(tmp_path, vault=True)
    with AgentProcess(config) as agent:
        agent.tell(Spawn(1, SEAT))
        agent.active(1)
        parts_stand(config)
        agent.tell(Shutdown("over", 10.0))
        assert agent.ended() == 0
        assert living(tmp_path) == []
        left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
        kinds = {name.split("/")[0] for name in left}
        assert kinds <= {"journal.jsonl", "logs", "crash", "coord", "agent.out"}, left
        assert not (tmp_path / "coord" / "address").exists()
        assert not Path(config.vault_socket).exists()
