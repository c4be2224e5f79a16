"""What an agent has its vault do: copy as it is told, and flush what is staged before the node is gone."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from holdfast import faults
from holdfast.checkpoint import Checkpointer, committed_steps
from holdfast.storage import opened
from holdfast.supervise.agent_config import AgentConfig
from holdfast.supervise.messages import AgentUp, KeepCopies, NodePreempted, Shutdown
from holdfast.vault.neighbourhood import named_neighbours
from tests.supervise.agent.agent_process import TOKEN, AgentProcess, config_of, living
from tests.vault.nodes import await_that
from tests.vault.trainer import is_step, state

pytestmark = pytest.mark.process
SMALL = 1 << 16
NOTICE_S = 15.0


@pytest.mark.parametrize("disk_s", [2.0, pytest.param(6.0, marks=pytest.mark.full)])
def test_a_notice_leaves_the_vault_the_time_to_flush_what_is_staged(disk_s: float, tmp_path: Path) -> None:
    # The second save takes its time on disk, and its trainer, of whom the agent does not know, stays.
    slow = {**config_of(tmp_path).env, faults.ENV: f"vault.part.synced:delay={disk_s}@2"}
    config = config_of(tmp_path, vault=True, hosts_coordinator=False, env=slow, notice_s=NOTICE_S)
    root = tmp_path / "ckpt"
    with AgentProcess(config) as agent:
        agent.expect(AgentUp)
        await_that(Path(f"{config.vault_socket}.address").exists, "the vault offers nothing")
        trainer = Checkpointer(
            root,
            writer=config.vault_socket,
            slots=2,
            serve="127.0.0.1:0",
            run=config.run,
            token=TOKEN.encode(),
            rank=0,
            world=1,
        )
        trainer.save(1, state(1, SMALL)).durable(60)
        trainer.save(2, state(2, SMALL)).staged(60)
        assert committed_steps(opened(str(root))) == [1]
        began = time.monotonic()
        agent.process.send_signal(signal.SIGTERM)
        agent.expect(NodePreempted)
        assert agent.ended() == 0
        assert time.monotonic() - began < NOTICE_S
        assert committed_steps(opened(str(root))) == [1, 2]
        assert living(tmp_path) == []
        trainer.close(60)
    with Checkpointer(root) as disk:
        assert is_step(disk.load(step=2), 2, SMALL)


def await_named(config: AgentConfig, neighbours: dict[str, str]) -> None:
    await_that(lambda: named_neighbours(config.neighbourhood) == neighbours, f"{neighbours} are not named")


def test_the_vault_is_told_whose_states_to_copy(tmp_path: Path) -> None:
    others = ((1, "file:/one.address"), (2, "file:/two.address"))
    config = config_of(tmp_path, vault=True, hosts_coordinator=False, vaults=others)
    with AgentProcess(config) as agent:
        agent.expect(AgentUp)
        agent.tell(KeepCopies((2, 7)))
        await_named(config, {"2": "file:/two.address"})
        (vault,) = living(tmp_path, HOLDFAST_PART="vault")
        agent.kill()
        # Whoever comes after it has been told nothing yet, and has the same vault.
        with AgentProcess(config) as successor:
            assert successor.expect(AgentUp).parts == ("vault",)
            assert living(tmp_path, HOLDFAST_PART="vault") == [vault]
            assert named_neighbours(config.neighbourhood) == {}
            successor.tell(KeepCopies((1,)))
            await_named(config, {"1": "file:/one.address"})
            successor.tell(Shutdown("the test is over", 0.0))
            assert successor.ended() == 0
    assert not Path(config.neighbourhood).exists()
