"""What a launch is made of, and the lock that keeps a run to one launch."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.coord import Settings
from holdfast.errors import LeaseError, UsageError
from holdfast.journal import Journal, RunEnded, StepDone
from holdfast.launch import Launch, LaunchSettings
from holdfast.launch.launcher import WISH, _compare_lanes, _compare_wire, lanes_before, leave_wish, taken_wish
from holdfast.launch.plan import agent_config, policy_settings
from holdfast.supervise.agent_config import read_config, vault_socket, write_config
from holdfast.supervise.decisions import StopAsked
from holdfast.supervise.members import REGROUP_S
from holdfast.supervise.run_lock import LOCK, RunLock
from holdfast.supervise.secret import run_token
from holdfast.supervise.status import STATUS_FILE, RunStatus
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
    assert (rules.last_call_s, rules.recall_s) == (30.0, 0.25)


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


def test_every_node_knows_where_the_vaults_of_the_others_are(tmp_path: Path) -> None:
    asked = settings(tmp_path, replicas=2, nodes=3)
    roots = [agent_config(asked, node, "t" * 32).root for node in range(3)]
    where = [f"file:{vault_socket(root)}.address" for root in roots]
    assert agent_config(asked, 0, "t" * 32).vaults == ((1, where[1]), (2, where[2]))
    assert agent_config(asked, 2, "t" * 32).vaults == ((0, where[0]), (1, where[1]))
    without = settings(tmp_path, nodes=3, vault=False)
    assert agent_config(without, 0, "t" * 32).vaults == ()
    assert (policy_settings(asked).vaults, policy_settings(without).vaults) == (True, False)


def test_the_policy_knows_what_nodes_fail_together_with(tmp_path: Path) -> None:
    racks = ("a", "a", "b", "b")
    assert policy_settings(settings(tmp_path, nodes=4, domains=racks)).domains == racks
    with pytest.raises(UsageError, match="there are 2 domains"):
        settings(tmp_path, nodes=3, domains=("a", "b"))


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
        {"wire_dtype": "float5"},
        {"wire_dtype": "float8_e8m0fnu"},
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
    code = "import sys, os; from pathlib import Path; from holdfast.supervise.run_lock import RunLock\n"
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


def test_a_wish_that_comes_while_another_is_read_is_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_wish(tmp_path, 3)
    read_text = Path.read_text

    def slowly(self: Path, encoding: str) -> str:
        text = read_text(self, encoding=encoding)
        leave_wish(tmp_path, 5)
        return text

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", slowly)
        assert taken_wish(tmp_path / WISH) == 3
    assert taken_wish(tmp_path / WISH) == 5


def test_whoever_looks_at_a_lock_for_a_moment_keeps_nobody_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `holdfast status` does: it takes the lock to see whether it is free."""
    (tmp_path / LOCK).write_text("process 1, which was killed")
    looks, taken = [True, True], []

    def flock(fd: int, how: int) -> None:
        if looks and looks.pop():
            raise BlockingIOError
        taken.append(how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunLock(tmp_path):
        assert (looks, len(taken)) == ([], 1)
        assert f"process {os.getpid()}" in (tmp_path / LOCK).read_text()


def test_an_agent_gets_variables_and_arguments_that_are_not_utf8(tmp_path: Path) -> None:
    latin = os.fsdecode(b"caf\xe9")
    asked = settings(tmp_path, script=(__file__, latin), environment={"PLACE": latin, "OTHER": "caf\u00e9"})
    config = agent_config(asked, 0, "t" * 32)
    assert read_config(write_config(config)) == config
    assert os.fsencode(config.env["PLACE"]) == b"caf\xe9"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"nproc": -1}, "nproc=-1 is less than 0"), ({"folder": os.fsdecode(b"caf\xe9")}, "not UTF-8")],
)
def test_settings_that_no_agent_could_follow_are_refused(
    wrong: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words):
        settings(tmp_path, **wrong)


def test_nothing_is_left_of_a_killed_vault_whose_socket_lies_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    (tmp_path / "temp").mkdir()
    launch = Launch(settings(tmp_path / ("long" * 30)))
    socket = Path(agent_config(launch.settings, 0, "t" * 32).vault_socket)
    assert socket.parent == tmp_path / "temp"
    for left in (socket, Path(f"{socket}.address")):
        left.touch()
    launch._tidy()
    assert list((tmp_path / "temp").iterdir()) == []


class Asked:
    """In the place of a conductor."""

    def __init__(self) -> None:
        self.wishes: list[object] = []

    def ask(self, wish: object) -> None:
        self.wishes.append(wish)


def test_no_wish_is_lost_while_a_launch_begins(tmp_path: Path) -> None:
    launch, conductor = Launch(settings(tmp_path, max_replicas=999)), Asked()
    begun = threading.Event()

    def wish(first: int) -> None:
        for replicas in range(first, first + 200):
            launch.resize(replicas)
            begun.set()

    wishers = [threading.Thread(target=wish, args=(first,)) for first in (0, 200)]
    for one in wishers:
        one.start()
    assert begun.wait(60.0)
    launch._conductor = conductor  # type: ignore[assignment]
    launch._pass_on()
    for one in wishers:
        one.join(60.0)
    assert sorted(getattr(one, "replicas", -1) for one in conductor.wishes) == list(range(400))


@pytest.mark.process
@pytest.mark.parametrize("ignored", [False, True])
def test_the_end_of_its_terminal_stops_a_launch_that_minds_it(
    ignored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, conductor = Launch(settings(tmp_path)), Asked()
    monkeypatch.setattr(launch, "_conductor", conductor)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with launch.signals():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert conductor.wishes == ([] if ignored else [StopAsked("SIGHUP", at_once=False)])


def test_another_number_of_lanes_than_before_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = settings(tmp_path, lanes=4)
    assert lanes_before(asked.journal) is None
    with Journal(asked.journal, component="worker 0") as journal:
        for lanes in (2, 8):
            journal.append(StepDone(step=lanes, seconds=1.0, replicas=1, lanes=lanes))
        journal.append(RunEnded(0, "StepDone"))
    assert lanes_before(asked.journal) == 8
    _compare_lanes(asked)
    assert "steps had 8 lanes so far and have 4 from now on" in caplog.text
    caplog.clear()
    _compare_lanes(settings(tmp_path, lanes=8))
    assert not caplog.text


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ("bfloat16", None, "sums were made in bfloat16 so far and are made unrounded from now on"),
        (None, "float16", "sums were made unrounded so far and are made in float16 from now on"),
        ("bfloat16", "bfloat16", ""),
    ],
)
def test_sums_in_another_dtype_than_before_are_said(
    before: str | None, now: str | None, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = settings(tmp_path, wire_dtype=now)
    asked.path.mkdir()
    for left in (b"", status_bytes(step=-1, wire_dtype="float32")):  # damaged; and nothing was trained
        (asked.path / STATUS_FILE).write_bytes(left)
        _compare_wire(asked)
    assert not caplog.text
    (asked.path / STATUS_FILE).write_bytes(status_bytes(step=0, wire_dtype=before))
    _compare_wire(asked)
    assert words in caplog.text
    assert bool(words) == bool(caplog.text)


def status_bytes(**changes: Any) -> bytes:
    found = RunStatus(
        run="demo", state="ended", wall=1.0, pid=1, replicas=1, workers_per_replica=1, min_replicas=1,
        seats=(), parked=(), nodes=(), **changes,
    )  # fmt: skip
    return msgspec.json.encode(found)
