"""What a launch is made of, and the lock that keeps a run to one launch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.coord import Settings
from holdfast.errors import LeaseError, UsageError
from holdfast.launch import LaunchSettings
from holdfast.launch.launcher import WISH, leave_wish, taken_wish
from holdfast.launch.lock import RunLock, run_token
from holdfast.launch.plan import agent_config, policy_settings
from holdfast.supervise.agent_config import vault_socket
from holdfast.supervise.members import REGROUP_S
from holdfast.supervise.watch import Deadlines


def settings(tmp_path: Path, **changes: Any) -> LaunchSettings:
    return LaunchSettings(**{"script": (__file__, "arg"), "folder": str(tmp_path), "run": "demo", **changes})


def test_the_coordinator_waits_for_all_seats_and_goes_on_with_the_least(tmp_path: Path) -> None:
    asked = settings(tmp_path, replicas=3, workers_per_replica=2, min_replicas=2, lanes=12)
    config = agent_config(asked, 0, "t" * 32)
    assert config.hosts_coordinator
    assert not agent_config(asked, 1, "t" * 32).hosts_coordinator
    rules = Settings(run="demo", **config.coordinator)
    assert (rules.min_size, rules.max_size, rules.divisible_by, rules.num_lanes) == (4, 6, 2, 12)
    assert rules.last_call_s == 30.0


def test_the_coordinator_waits_for_whoever_is_busy_as_long_as_the_agent_does(tmp_path: Path) -> None:
    config = agent_config(settings(tmp_path), 0, "t" * 32)
    rules = Settings(run="demo", **config.coordinator)
    assert rules.straggler_s == config.deadlines.longest_s == 1800.0  # a compile
    assert rules.straggler_s <= REGROUP_S
    slow = Deadlines(phases={"restore": 2700.0})
    config = agent_config(settings(tmp_path, deadlines=slow), 0, "t" * 32)
    assert config.coordinator["straggler_s"] == 2700.0


def test_a_run_that_may_grow_does_not_wait_for_those_who_may_never_come(tmp_path: Path) -> None:
    asked = settings(tmp_path, replicas=1, max_replicas=4)
    config = agent_config(asked, 0, "t" * 32)
    assert (config.coordinator["max_size"], config.coordinator["last_call_s"]) == (4, 2.0)
    assert policy_settings(asked).max_replicas == 4


def test_one_replica_on_several_nodes_has_copies_at_neighbours(tmp_path: Path) -> None:
    lone = settings(tmp_path, replicas=1, workers_per_replica=2, nodes=2)
    root = agent_config(lone, 1, "t" * 32).root
    kept = agent_config(lone, 0, "t" * 32).neighbours
    assert kept == ((1, f"file:{vault_socket(root)}.address"),)
    assert agent_config(settings(tmp_path, replicas=2, nodes=2), 0, "t" * 32).neighbours == ()


def test_a_launch_from_within_a_worker_is_a_run_of_its_own(tmp_path: Path) -> None:
    environment = {"HOLDFAST_CONTROL_FD": "7", "HOLDFAST_RUN": "outer", "HOLDFAST_FAULTS": "", "PATH": "/bin"}
    config = agent_config(settings(tmp_path, environment=environment), 0, "t" * 32)
    assert config.env == {"HOLDFAST_FAULTS": "", "PATH": "/bin"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"run": "../x"},
        {"script": ()},
        {"script": ("/no/such/script.py",)},
        {"lanes": 0},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        settings(tmp_path, **wrong)


def test_rules_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        policy_settings(settings(tmp_path, replicas=1, min_replicas=2))


def test_the_token_is_made_once_and_is_for_this_user_only(tmp_path: Path) -> None:
    token = run_token(tmp_path)
    assert len(token) == 64
    assert run_token(tmp_path) == token
    path = tmp_path / "coord" / "token"
    assert path.stat().st_mode & 0o077 == 0
    assert os.listdir(path.parent) == ["token"]


def test_a_run_has_one_launch_at_a_time(tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(LeaseError, match=f"by process {os.getpid()} on"):
        RunLock(tmp_path)
    assert os.listdir(tmp_path) == []
    RunLock(tmp_path).close()


def test_a_lock_goes_with_its_process(tmp_path: Path) -> None:
    code = "import sys, os; from pathlib import Path; from holdfast.launch.lock import RunLock\n"
    code += "RunLock(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == -9
    RunLock(tmp_path).close()


def test_a_wish_is_taken_once(tmp_path: Path) -> None:
    assert taken_wish(tmp_path / WISH) is None
    leave_wish(tmp_path, 3)
    assert taken_wish(tmp_path / WISH) == 3
    assert os.listdir(tmp_path) == []
    (tmp_path / WISH).write_text("many")
    assert taken_wish(tmp_path / WISH) is None
