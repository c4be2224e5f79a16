"""Fault sites: parsing, counting, and each action in a real process."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from holdfast import faults
from holdfast.errors import UsageError

SITE = "vault.block.written"
OTHER = "vault.voted"


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    faults.disarm()


def hit_until_raise(limit: int) -> list[int]:
    fired = []
    for number in range(1, limit + 1):
        try:
            faults.site(SITE)
        except RuntimeError:
            fired.append(number)
    return fired


@pytest.mark.parametrize(
    ("rule", "fires_at"),
    [("raise", [1]), ("raise@3", [3]), ("raise@3+", [3, 4, 5]), ("raise@1+", [1, 2, 3, 4, 5])],
)
def test_rule_fires_at_its_hits(rule: str, fires_at: list[int]) -> None:
    faults.arm(f"{SITE}:{rule}")
    assert hit_until_raise(5) == fires_at


def test_sites_count_separately_and_rules_add_up() -> None:
    faults.arm(f" {SITE}:raise@2 ; {OTHER}:raise; {SITE}:raise@4;")
    with pytest.raises(RuntimeError, match=f"injected at {OTHER}"):
        faults.site(OTHER)
    assert hit_until_raise(5) == [2, 4]


def test_nothing_happens_when_off() -> None:
    faults.arm(f"{SITE}:raise")
    faults.disarm()
    faults.site(SITE)
    faults.arm("")
    faults.site(SITE)


@pytest.mark.parametrize(("action", "number"), [("eio", errno.EIO), ("enospc", errno.ENOSPC)])
def test_os_errors(action: str, number: int) -> None:
    faults.arm(f"{SITE}:{action}")
    with pytest.raises(OSError, match=f"injected at {SITE}") as caught:
        faults.site(SITE)
    assert caught.value.errno == number


def test_delay_takes_its_time() -> None:
    faults.arm(f"{SITE}:delay=0.05")
    before = time.monotonic()
    faults.site(SITE)
    assert time.monotonic() - before >= 0.05


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("vault.typo:kill", "unknown fault site 'vault.typo'\n\nhint: one of: trainer.save.begin,"),
        (f"{SITE}:boom", "unknown fault action 'boom'\n\nhint: one of: kill, stop, exit, eio,"),
        (f"{SITE}:delay=soon", "unknown fault action 'delay=soon'"),
        (f"{SITE}:delay=-1", "unknown fault action 'delay=-1'"),
        (f"{SITE}:delay=inf", "unknown fault action 'delay=inf'"),
        (f"{SITE}:kill@0", "is not site:action"),
        (f"{SITE}:kill@x", "is not site:action"),
        (SITE, "is not site:action"),
    ],
)
def test_wrong_spec_says_what_is_valid(spec: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        faults.arm(spec)
    assert message in str(caught.value)


def test_unknown_site_in_code_is_an_error_when_armed() -> None:
    faults.arm(f"{SITE}:raise")
    with pytest.raises(UsageError, match="unknown fault site"):
        faults.site("no.such.site")


def test_one_shot_fires_once_among_many_threads() -> None:
    faults.arm(f"{SITE}:raise@500")
    fired: list[int] = []

    def work() -> None:
        fired.extend(hit_until_raise(250))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(fired) == 1


def run_armed(spec: str) -> subprocess.Popen[bytes]:
    code = f"from holdfast import faults; faults.site({SITE!r}); print('alive', flush=True)"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, faults.ENV: spec},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.process
@pytest.mark.parametrize(("action", "status"), [("kill", -signal.SIGKILL), ("exit", 17), ("raise@2", 0)])
def test_environment_arms_a_process(action: str, status: int) -> None:
    with run_armed(f"{SITE}:{action}") as process:
        out, _ = process.communicate(timeout=30)
    assert process.returncode == status
    assert (out == b"alive\n") == (status == 0)


@pytest.mark.process
def test_stop_stops_and_can_be_continued() -> None:
    with run_armed(f"{SITE}:stop") as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        out, _ = process.communicate(timeout=30)
    assert out == b"alive\n"


@pytest.mark.process
def test_the_thread_that_stops_does_not_go_on() -> None:
    # A stop of the process would be taken by the main thread, and this one would go on until that had run.
    code = f"""
import os, threading
from holdfast import faults

def work():
    for number in range(300):
        faults.site({SITE!r})
        os.write(1, b"%d\\n" % number)

threading.Thread(target=work).start()
"""
    command = [sys.executable, "-c", code]
    env = {**os.environ, faults.ENV: f"{SITE}:stop@1+"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            for number in range(300):
                stopped = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
                assert stopped is not None
                assert stopped.si_code == os.CLD_STOPPED, f"it stopped {number} times of 300"
                assert not select.select([process.stdout], [], [], 0)[0], "it went on"
                process.send_signal(signal.SIGCONT)
                assert process.stdout.readline() == b"%d\n" % number
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()


@pytest.mark.process
def test_wrong_environment_fails_the_import() -> None:
    with run_armed("nonsense:kill") as process:
        out, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert b"unknown fault site 'nonsense'" in err
    assert out == b""
