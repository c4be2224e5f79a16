"""Logs, processes and parts: the small pieces that an agent is made of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.coord.orphans import is_held
from holdfast.errors import UsageError
from holdfast.journal import Journal
from holdfast.supervise import agent_crew
from holdfast.supervise.agent_burials import Undertaker
from holdfast.supervise.agent_config import name_neighbours, read_config, vault_socket, write_config
from holdfast.supervise.agent_crew import Crew
from holdfast.supervise.agent_loop import Loop
from holdfast.supervise.logs import Console, Tail, last_error, last_lines, opened, shown
from holdfast.supervise.memory_kills import MemoryKills
from holdfast.supervise.messages import CRASHED, OUT_OF_MEMORY, Report, Seat, WorkerEnded
from holdfast.supervise.parts import Part, recipes
from holdfast.supervise.processes import Exit, Process, end_marked, marked, oom_kills
from holdfast.vault.neighbourhood import named_neighbours
from tests.supervise.agent.agent_process import TIMEOUT_S, config_of


def test_a_config_arrives_as_it_was_written(tmp_path: Path) -> None:
    config = config_of(tmp_path, vaults=((1, "file:/x"),), log_slots=(0, 3))
    assert read_config(write_config(config)) == config


def test_a_vault_reads_whom_its_agent_names(tmp_path: Path) -> None:
    latin = os.fsdecode(b"file:/caf\xe9")
    config = config_of(tmp_path, vaults=((1, "file:/x=y"), (2, "file:/z"), (12, latin)))
    os.makedirs(config.root)
    for nodes in ((1, 12, 7), (2,), ()):
        name_neighbours(config, nodes)
        wanted = {str(node): address for node, address in config.vaults if node in nodes}
        assert named_neighbours(config.neighbourhood) == wanted
    assert os.listdir(config.root) == ["neighbours"]


def test_what_is_no_config_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text('{"run": 7}')
    with pytest.raises(UsageError, match="no config"):
        read_config(os.open(path, os.O_RDONLY))


def test_a_socket_whose_name_would_be_too_long_lies_elsewhere() -> None:
    assert vault_socket("/runs/demo/nodes/0") == "/runs/demo/nodes/0/vault.sock"
    long = "/" + "x" * 120
    assert len(vault_socket(long)) < 100
    assert vault_socket(long) == vault_socket(long) != vault_socket(long + "y")


def test_the_node_of_the_coordinator_has_one(tmp_path: Path) -> None:
    def names(**changes: Any) -> list[str]:
        return [recipe.name for recipe in recipes(config_of(tmp_path, **changes))]

    assert names(vault=True) == ["coordinator", "vault"]
    assert names(hosts_coordinator=False, vault=True) == ["vault"]
    assert names(workers_per_replica=2) == ["coordinator", "worlds"]


def test_a_coordinator_comes_back_where_it_was_unless_that_place_is_taken(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    (recipe,) = recipes(config)
    assert recipe.argv(0)[-1] == "tcp://127.0.0.1:0"
    Path(config.discovery).parent.mkdir()
    Path(config.discovery).write_text("tcp://127.0.0.1:4711\n")
    assert recipe.argv(0)[-1] == "tcp://127.0.0.1:4711"
    assert recipe.argv(2)[-1] == "tcp://127.0.0.1:0"


@pytest.mark.process
def test_a_part_that_is_stopped_is_continued(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    part = Part(recipes(config)[0], config)
    with subprocess.Popen(["sleep", "600"]) as child:
        part.process = Process(child.pid, child=child)
        try:
            assert not part.tick(100.0)
            child.send_signal(signal.SIGSTOP)
            assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])
            assert not part.tick(101.0)
            assert not part.tick(101.9)
            assert part.tick(102.0)
            assert os.WIFCONTINUED(os.waitpid(child.pid, os.WCONTINUED)[1])
            assert not part.tick(104.0)
        finally:
            child.kill()
    part.forget()


def test_a_part_that_keeps_ending_is_started_with_pauses(tmp_path: Path) -> None:
    part = Part(recipes(config_of(tmp_path))[0], config_of(tmp_path))
    pauses = []
    for life_s in (1.0, 1.0, 1.0, 1.0, 1.0, 60.0, 1.0):
        part._started_at = 1000.0
        part.lost(Exit(1), 1000.0 + life_s)
        assert part.restart_at is not None
        pauses.append(round(part.restart_at - 1000.0 - life_s, 3))
    assert pauses == [0.0, 0.2, 0.4, 0.8, 1.0, 0.0, 0.0]


def test_exits_in_words() -> None:
    assert str(Exit(78)) == "exit code 78"
    assert str(Exit(-9)) == "killed by SIGKILL"
    assert str(Exit(-250)) == "killed by signal 250"
    assert str(Exit(None)) == "ended"


def test_which_output_is_shown() -> None:
    assert shown("all") is None
    assert shown("0,3") == frozenset({0, 3})
    with pytest.raises(ValueError, match="invalid literal"):
        shown("zero")


def test_what_an_earlier_launch_wrote_is_no_part_of_a_tail(tmp_path: Path) -> None:
    path = tmp_path / "0-1.log"
    path.write_text("of the one before\nnow\n")
    since = len("of the one before\n")
    tail = Tail(str(path), since=since)
    assert tail.lines() == last_lines(str(path), 2, since=since) == ["now"]
    tail.close()


def test_an_error_is_not_its_hint() -> None:
    assert (
        last_error(["step 3", "MismatchError: w", "hint: parts= selects", "and more"]) == "MismatchError: w"
    )
    assert last_error(["step 3", "ValueError: w"]) == "ValueError: w"
    assert last_error(["hint: alone"]) == last_error([]) == ""


def test_a_tail_gives_whole_lines_and_the_end_of_progress_bars(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "0-1.log"
    fd = opened(str(path))
    tail = Tail(str(path))
    os.write(fd, b"one\ntw")
    assert tail.lines() == ["one"]
    os.write(fd, b"o\n10%\r50%\r100%\n\xff\n")
    assert tail.lines() == ["two", "100%", "\ufffd"]
    os.write(fd, b"no end")
    assert tail.lines() == []
    assert tail.lines(all_=True) == ["no end"]
    assert last_lines(str(path), 2) == ["\ufffd", "no end"]
    assert last_lines(str(tmp_path / "none"), 2) == []
    tail.close()
    os.close(fd)


def test_a_console_that_nobody_reads_holds_nobody_up() -> None:
    source, sink = os.pipe()
    console = Console(sink)
    for number in range(2000):
        console.say(f"line {number} {'x' * 100}")
    while len(os.read(source, 1 << 16)) == 1 << 16:
        pass
    console.say("again")
    assert "lines are missing here)\nagain" in os.read(source, 1 << 16).decode()
    os.close(source)
    console.say("nobody is there")
    os.close(sink)


@pytest.mark.process
def test_processes_are_found_by_their_marks_and_ended(tmp_path: Path) -> None:
    marks = {"HOLDFAST_FOLDER": str(tmp_path), "HOLDFAST_PART": "worker"}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"],
            env={**os.environ, **marks},
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
    assert {pid for pid, _ in marked(marks)} == {child.pid for child in children}
    assert list(marked({**marks, "HOLDFAST_PART": "vault"})) == []
    assert end_marked(marks) == 2
    for child in children:
        assert child.wait(TIMEOUT_S) == -9
        assert child.stdout is not None
        child.stdout.close()


def test_the_kernel_says_how_often_it_killed_for_memory_or_nothing() -> None:
    assert (oom_kills() or 0) >= 0


def test_each_kill_for_want_of_memory_is_matched_with_one_death() -> None:
    kills = MemoryKills(5)
    assert not kills.claims(5, now=100.0)
    # Two were killed before the first was seen; a third SIGKILL was somebody else's.
    assert [kills.claims(7, now=100.0 + at) for at in range(3)] == [True, True, False]
    # What nobody died of here in good time was not for one of ours.
    assert kills.claims(9, now=110.0)
    assert not kills.claims(9, now=120.0)
    assert kills.claims(10, now=121.0)
    assert not MemoryKills(None).claims(None, now=0.0)


class NoUndertaker:
    def bury(self, incarnation: str, reason: str) -> None:
        pass


@pytest.mark.process
# An agent has no JAX in it; this process has, after the tests of other rooms.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.parametrize(("rose", "cause"), [(0, CRASHED), (1, OUT_OF_MEMORY)])
def test_a_kill_for_want_of_memory_has_its_own_cause(
    rose: int, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The counter of a control group is the kernel's: here it is played.
    kills = [5]
    monkeypatch.setattr(agent_crew, "oom_kills", lambda: kills[0])
    config = config_of(tmp_path, program=("/bin/sh", "-c", "kill -9 $$", "sh"))
    reports: list[Report] = []
    loop = Loop()
    journal = Journal(config.journal)
    undertaker: Undertaker = NoUndertaker()  # type: ignore[assignment]
    console = Console(os.open(os.devnull, os.O_WRONLY))
    crew = Crew(config, loop, reports.append, journal=journal, undertaker=undertaker, console=console)
    kills[0] += rose
    crew.spawn(1, Seat(0, 0, 1))
    ends = time.monotonic() + TIMEOUT_S
    while len(crew) and time.monotonic() < ends:
        loop.turn(1.0)
    ended = reports[-1]
    assert isinstance(ended, WorkerEnded)
    assert (ended.cause, ended.code) == (cause, -9)
    crew.close()
    loop.close()
    journal.close()


def test_a_lease_is_held_or_free(tmp_path: Path) -> None:
    import fcntl

    path = tmp_path / "lease"
    assert not is_held(str(path))
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    assert not is_held(str(path))
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert is_held(str(path))
    os.close(fd)
    assert not is_held(str(path))
