"""Agents on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.launch import LaunchSettings
from holdfast.launch.local import LocalAgents
from holdfast.launch.plan import agent_config

pytestmark = pytest.mark.process


def local_agents(settings: LaunchSettings) -> LocalAgents:
    return LocalAgents(lambda node: agent_config(settings, node, "t" * 32), say=lambda line: None)


def test_an_agent_that_is_stopped_while_it_starts_is_continued(tmp_path: Path) -> None:
    settings = LaunchSettings(script=(__file__,), folder=str(tmp_path), run="demo", vault=False)
    agents = local_agents(settings)
    stream = agents.start(0)
    try:
        pid = agents.pid(0)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        assert os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT) is not None
        agents.wake(100.0, stopped_s=7.0)
        agents.wake(106.9, stopped_s=7.0)
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        agents.wake(107.0, stopped_s=7.0)
        assert os.waitid(os.P_PID, pid, os.WCONTINUED) is not None
        agents.wake(108.0, stopped_s=7.0)
    finally:
        stream.close()
        agents.close(str(settings.path), 5.0)


def test_what_an_agent_had_forked_when_it_was_killed_ends_as_well(tmp_path: Path) -> None:
    settings = LaunchSettings(script=(__file__,), folder=str(tmp_path), run="demo", vault=False)
    agents = local_agents(settings)
    agents.start(0).close()
    # Stands for a child that is not another program yet: until then it has the environment of the agent.
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command, env={"HOLDFAST_AGENT": f"{settings.path}:0"}) as forked:
        try:
            agents.close(str(settings.path), 5.0)
            assert forked.wait(60.0) == -signal.SIGKILL
        finally:
            forked.kill()
