"""Agents on this machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from holdfast.launch import LaunchSettings
from holdfast.launch.local import LocalAgents
from holdfast.launch.plan import agent_config


@pytest.mark.process
def test_an_agent_that_is_stopped_while_it_starts_is_continued(tmp_path: Path) -> None:
    settings = LaunchSettings(script=(__file__,), folder=str(tmp_path), run="demo", vault=False)
    agents = LocalAgents(lambda node: agent_config(settings, node, "t" * 32), say=lambda line: None)
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
