"""Who is nice while a node's workers start, and for how long."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.supervise.precedence import Standing, is_hushed, is_nice
from holdfast.supervise.processes import renice_session

STARTING = Standing(0)
TRAINING = Standing(0, member=True, trains=True, phase="step")
PARKED = Standing(None, warming=True)
NICE = Standing(1, warming=True)


def test_parked_processes_and_whoever_starts_beside_a_member_are_nice() -> None:
    assert is_nice(None, [], successor=False)
    assert is_nice(1, [TRAINING], successor=False)
    assert not is_nice(0, [PARKED], successor=True)


def test_a_run_that_begins_starts_all_alike() -> None:
    assert not is_nice(1, [STARTING], successor=False)


def test_after_a_loss_of_all_replicas_start_one_after_the_other() -> None:
    assert not is_nice(0, [], successor=True)
    assert not is_nice(0, [STARTING], successor=True)  # another worker of the same replica
    assert is_nice(1, [STARTING], successor=True)


def test_whoever_warms_up_steps_back_until_there_is_a_step_and_no_longer() -> None:
    assert is_hushed([STARTING, PARKED])
    assert is_hushed([TRAINING, STARTING._replace(replica=1, member=True), PARKED])
    assert not is_hushed([TRAINING, PARKED])
    # One that is nice itself holds nobody up: it starts beside others that train.
    assert not is_hushed([TRAINING, NICE, PARKED])


@pytest.mark.parametrize("phase", ["start", "import", "init", "compile", "restore", "step"])
def test_nobody_steps_back_for_one_that_waits_for_others(phase: str) -> None:
    coming = STARTING._replace(phase=phase)
    assert is_hushed([coming, NICE])
    assert not is_hushed([coming._replace(waits=True), NICE]), "it may wait for the one that steps back"


@pytest.mark.parametrize("phase", ["eval", "save", "shutdown", "one of the program's own"])
def test_nobody_steps_back_for_what_is_not_on_the_way_to_a_step(phase: str) -> None:
    assert not is_hushed([STARTING._replace(phase=phase), NICE])


@pytest.fixture
def session() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process.pid
    process.kill()
    process.wait(10.0)


def _niceness(pid: int) -> int:
    found = re.search(r"nice (-?\d+)", Path(f"/proc/{pid}/autogroup").read_text())
    assert found is not None
    return int(found[1])


@pytest.mark.process
def test_a_session_steps_back_and_comes_again(session: int) -> None:
    if not Path(f"/proc/{session}/autogroup").exists():
        pytest.skip("Linux does not share by session here")
    renice_session(session, 10)
    if _niceness(session) == 0:
        pytest.skip("not permitted: no CAP_SYS_ADMIN")
    assert _niceness(session) == 10
    renice_session(session, 0)
    assert _niceness(session) == 0


def test_a_process_that_is_gone_has_no_session_to_change() -> None:
    renice_session(2**22 - 1, 10)
