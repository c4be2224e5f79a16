"""The journal under real processes: many writers, SIGKILL, fork, exit, and a disk that fills up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from holdfast.clock import Deadline
from holdfast.journal import Dropped, Journal, SaveStarted, follow, read

pytestmark = pytest.mark.process


def python(code: str, *args: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def steps_by_component(path: Path) -> dict[str, list[int]]:
    steps = defaultdict(list)
    for record in read(path):
        assert isinstance(record.event, SaveStarted)
        steps[record.component].append(record.event.step)
    return steps


WRITER = """
import sys
from holdfast.journal import Journal, SaveStarted
path, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
journal = Journal(path, component=name, capacity=1 << 30)
print("ready", flush=True)
sys.stdin.readline()
for step in range(count):
    journal.append(SaveStarted(step=step))
    if step % 100 == 0:
        journal.flush(30.0)
"""


def test_many_writers_one_of_them_killed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    writers = [python(WRITER, path, f"w{n}", 3000) for n in range(3)]
    victim = python(WRITER, path, "victim", 10**9)
    try:
        for process in [*writers, victim]:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        for process in [victim, *writers]:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.close()
        for record in follow(path, timeout_s=60.0):  # kill it in full flight
            if record.component == "victim" and record.event == SaveStarted(step=200):
                break
        victim.kill()
        for process in writers:
            assert process.wait(timeout=60) == 0
        assert victim.wait(timeout=60) == -signal.SIGKILL
    finally:
        for process in [*writers, victim]:
            process.kill()
            process.wait(timeout=60)
            assert process.stdout is not None
            process.stdout.close()

    steps = steps_by_component(path)
    for n in range(3):
        assert steps[f"w{n}"] == [*range(3000)]
    assert len(steps["victim"]) > 200
    assert steps["victim"] == [*range(len(steps["victim"]))]
    with Journal(path, component="later") as journal:
        journal.append(SaveStarted(step=1))
    assert steps_by_component(path)["later"] == [1]


def test_exit_without_close_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    code = """
import sys
from holdfast.journal import Journal, SaveStarted
journal = Journal(sys.argv[1], component="x")
for step in range(5000):
    journal.append(SaveStarted(step=step))
raise SystemExit(3)
"""
    with python(code, path) as process:
        assert process.wait(timeout=60) == 3
    assert steps_by_component(path) == {"x": [*range(5000)]}


def test_fork_leaves_both_sides_working(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    code = """
import os, sys
from holdfast.journal import Journal, SaveStarted
journal = Journal(sys.argv[1], component="x")
for step in range(1000):
    journal.append(SaveStarted(step=step))
child = os.fork()
for step in range(1000, 2000):
    journal.append(SaveStarted(step=step))
ok = journal.close(30.0)
if child == 0:
    os._exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0
assert ok
"""
    with python(code, path) as process:
        assert process.wait(timeout=60) == 0
    by_pid = defaultdict(list)
    for record in read(path):
        assert isinstance(record.event, SaveStarted)
        by_pid[record.pid].append(record.event.step)
    assert by_pid.pop(process.pid) == [*range(2000)]
    assert [*by_pid.values()] == [[*range(1000, 2000)]]


@pytest.mark.parametrize(
    ("lacking", "count", "damaged"),
    [(20, 50, 1), (1, 50, 0), (1, 2, 0), (0, 50, 0)],
    ids=["within a line", "before a newline", "before the last newline", "between lines"],
)
def test_disk_that_fills_up_and_is_freed(tmp_path: Path, lacking: int, count: int, damaged: int) -> None:
    """A file size limit cuts write(2) short exactly as a full disk does; here, the second line."""
    path = tmp_path / "journal"
    code = """
import os, resource, sys, time
from holdfast.clock import Deadline, ManualClock
from holdfast.journal import Journal, SaveStarted
path, lacking, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
journal = Journal(path, component="x", clock=ManualClock())  # so that lines are of one length
journal.append(SaveStarted(step=0))
assert journal.flush(30.0)
full = 2 * os.path.getsize(path) - lacking
resource.setrlimit(resource.RLIMIT_FSIZE, (full, resource.RLIM_INFINITY))
for step in range(1, count):
    journal.append(SaveStarted(step=step))
deadline = Deadline(30.0)
while os.path.getsize(path) < full:
    deadline.check("the disk to be full")
    time.sleep(0.005)
assert not journal.flush(0.0)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert journal.close(30.0)
"""
    with python(code, path, lacking, count) as process:
        assert process.wait(timeout=60) == 0
    reading = read(path)
    assert [record.event for record in reading] == [SaveStarted(step=step) for step in range(count)]
    assert reading.damaged == damaged
    assert path.read_bytes().endswith(b"\n")


def test_hanging_disk_never_blocks_the_caller(tmp_path: Path) -> None:
    """A disk that hangs (here: a pipe nobody reads) costs events, not time."""
    path = tmp_path / "journal"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    journal = Journal(path, capacity=1000)
    deadline = Deadline(30.0)
    try:
        for step in range(100_000):
            journal.append(SaveStarted(step=step))
        deadline.check("append")
        assert not journal.close(0.05)
    finally:
        while not journal.close(0.01):  # empty the pipe so that the thread can end
            with contextlib.suppress(BlockingIOError):
                os.read(reader, 1 << 20)
            deadline.check("the writer thread")
        os.close(reader)


def test_dropped_events_are_reported_by_the_next_write(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path, capacity=10) as journal:
        for step in range(50_000):
            journal.append(SaveStarted(step=step))
    seen = [record.event for record in read(path)]
    kept = sum(isinstance(event, SaveStarted) for event in seen)
    dropped = sum(event.count for event in seen if isinstance(event, Dropped))
    assert kept + dropped == 50_000
    assert dropped > 0
