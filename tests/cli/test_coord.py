"""`holdfast coord status|barriers|get|set` against a real coordinator."""

from __future__ import annotations

import base64
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from holdfast.cli import main, overview, terminal
from holdfast.coord.client import CoordClient
from holdfast.coord.messages import MemberState, Overview, Stop, Waiting
from holdfast.coord.settings import Settings
from tests.cli.saved import answer, holdfast
from tests.cli.serving import TOKEN, served

DEADLINE_S = 30.0


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A coordinator of run `demo` for two members; the environment says where it is."""
    token_file = tmp_path / "token"
    token_file.write_bytes(TOKEN + b"\n")
    settings = Settings(run="demo", min_size=2, max_size=2, suspect_s=30.0, dead_s=60.0)
    with served(tmp_path / "coord", settings) as found:
        monkeypatch.setenv("HOLDFAST_COORD", found)
        monkeypatch.setenv("HOLDFAST_RUN", "demo")
        monkeypatch.setenv("HOLDFAST_TOKEN_FILE", str(token_file))
        yield found


def two_members(stack: ExitStack, address: str) -> list[CoordClient]:
    members = [
        stack.enter_context(CoordClient(address, run="demo", token=TOKEN, name=f"worker-{number}"))
        for number in range(2)
    ]
    joining = threading.Thread(target=members[1].join, kwargs={"slot": 1, "timeout_s": DEADLINE_S})
    joining.start()
    members[0].join(slot=0, timeout_s=DEADLINE_S)
    joining.join(DEADLINE_S)
    return members


def eventually(*words: str) -> Any:
    """The answer of `holdfast coord ...` once somebody waits."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := answer(*words))["waiting"]:
        assert time.monotonic() < deadline
    return found


# ---- status and barriers


def test_status_of_a_run_that_has_not_begun(address: str) -> None:
    done = holdfast("coord", "status")
    assert (done.exit_code, done.stderr) == (0, "")
    assert re.match(r"run demo: no generation yet, term 1, service [0-9a-f]+\n\n0 keys \(0 B\)", done.stdout)


def test_status_and_barriers_say_who_waits_for_whom(address: str) -> None:
    assert holdfast("coord", "barriers").stderr == "nobody waits\n"
    with ExitStack() as stack:
        members = two_members(stack, address)
        members[0].progress(12, "train")
        waiting = threading.Thread(target=members[0].barrier, args=("epoch-end",))
        waiting.start()
        found = eventually("coord", "barriers")
        (wait,) = found["waiting"]
        assert (found["run"], found["generation"]) == ("demo", 1)
        assert (wait["kind"], wait["name"], wait["present"], wait["missing"]) == (
            "barrier",
            "epoch-end",
            [0],
            [1],
        )
        shown = holdfast("coord", "barriers").stdout.splitlines()
        assert shown[0].split() == ["KIND", "NAME", "EPOCH", "FOR", "THERE", "MISSING"]
        assert re.fullmatch(r"barrier  epoch-end +\d+ +\d\.\d s  1 of 2  1 \(worker-1\)", shown[1])
        whole = holdfast("coord", "status").stdout
        assert whole.startswith("run demo: generation 1 of 2 members, term 1,")
        assert re.search(r"^ +0  worker-0  alive +12  train +\d\.\d s  yes$", whole, re.MULTILINE)
        assert re.search(r"^ +1  worker-1  alive ", whole, re.MULTILINE)
        assert "waiting\n  KIND " in whole
        members[1].barrier("epoch-end")
        waiting.join(DEADLINE_S)


def test_status_as_json(address: str) -> None:
    with ExitStack() as stack:
        two_members(stack, address)
        found = answer("coord", "status")
    assert set(found) == {
        *("run", "term", "service", "generation", "forming", "finished", "stop", "members", "standbys"),
        *("waiting", "keys", "key_bytes", "sessions", "watches", "records"),
    }
    assert [(member["slot"], member["name"], member["state"]) for member in found["members"]] == [
        (0, "worker-0", "alive"),
        (1, "worker-1", "alive"),
    ]
    assert set(found["members"][0]) == {
        *("slot", "name", "incarnation", "state", "step", "phase", "silent_s", "out_of_sync"),
    }


def _overview(**changes: Any) -> Overview:
    members = (
        MemberState(0, "aa", "w0", "alive", 7, "train", 0.25, False),
        MemberState(1, "bb" * 8, "", "vacant", -1, "", 0.0, True),
    )
    plain: dict[str, Any] = {
        "run": "r", "term": 3, "service": "cafe", "generation": 2, "forming": False, "finished": False,
        "members": members, "standbys": ("spare",), "waiting": (), "keys": 1, "key_bytes": 2048,
        "sessions": 3, "watches": 0, "records": 1234,
    }  # fmt: skip
    return Overview(**{**plain, **changes})


def test_what_status_says_of_rare_states(capsys: pytest.CaptureFixture[str]) -> None:
    overview.say(_overview(forming=True, stop=Stop(1, -1, "the node goes")))
    shown = capsys.readouterr().out
    assert "generation 2 of 2 members, the next one is forming" in shown
    assert "stop 1 at not yet agreed: the node goes" in shown
    assert re.search(r"^ +1  bbbbbbbb  vacant +-  - +-  out of sync$", shown, re.MULTILINE)
    assert "standby: spare" in shown
    assert "1 key (2.0 KiB), 3 sessions, 0 watches, 1,234 records written" in shown
    overview.say(_overview(finished=True, stop=Stop(2, 40), sessions=1, watches=1, records=1))
    shown = capsys.readouterr().out
    assert "finished in generation 2" in shown
    assert "stop 2 at step 40: no reason given" in shown
    assert "1 key (2.0 KiB), 1 session, 1 watch, 1 record written" in shown


def test_many_missing_are_ranges_and_the_longest_wait_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    waiting = (
        Waiting("barrier", "short", 1, (0,), (1,), 0.1),
        Waiting("vote", "long", 2, (), (*range(2, 99), 200), 300.0),
    )
    overview.say_waits(_overview(waiting=waiting))
    first, second = capsys.readouterr().out.splitlines()[1:]
    assert re.fullmatch(r"vote +long +2 +5 min  0 of 98  2-98, 200", first)
    assert re.fullmatch(r"barrier +short +1 +0\.1 s +1 of 2  1", second)


@pytest.mark.parametrize(
    ("numbers", "text"), [((), ""), ((4,), "4"), ((3, 1, 2, 7), "1-3, 7"), ((0, 2, 4), "0, 2, 4")]
)
def test_ranges(numbers: tuple[int, ...], text: str) -> None:
    assert terminal.ranges(numbers) == text


# ---- keys


def test_set_and_get(address: str) -> None:
    done = holdfast("coord", "set", "lr", "0.1")
    assert re.fullmatch(r"revision \d+\n", done.stdout), done.stderr
    assert holdfast("coord", "get", "lr").stdout == "0.1\n"
    assert answer("coord", "get", "lr") == {
        "key": "lr",
        "bytes": 3,
        "text": "0.1",
        "base64": base64.b64encode(b"0.1").decode(),
    }
    assert answer("coord", "set", "lr", "0.2")["revision"] > 1
    assert holdfast("coord", "get", "lr", "--wait", "5").stdout == "0.2\n"


def test_a_key_that_is_not_there(address: str) -> None:
    done = holdfast("coord", "get", "nothing")
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", "no key 'nothing'\n")
    done = holdfast("coord", "get", "nothing", "--wait", "0.05")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert "nothing" in done.stderr


def test_bytes_that_are_no_text(address: str) -> None:
    value = b"\x00\xffbinary\x1b[31m\n"
    done = CliRunner().invoke(main, ["coord", "set", "blob", "-"], input=value)
    assert done.exit_code == 0, done.stderr
    assert holdfast("coord", "get", "blob", "--raw").stdout_bytes == value
    assert holdfast("coord", "get", "blob").stdout == f"{value!r}\n"
    found = answer("coord", "get", "blob")
    assert found["text"] is None
    assert base64.b64decode(found["base64"]) == value


def test_keys_by_prefix(address: str) -> None:
    for key in ("a/1", "a/2", "b"):
        holdfast("coord", "set", key, "x" * 100)
    shown = holdfast("coord", "get", "a/", "--prefix").stdout.splitlines()
    assert [line.split()[0] for line in shown] == ["KEY", "a/1", "a/2"]
    assert shown[1].endswith("...")
    assert [one["key"] for one in answer("coord", "get", "", "--prefix")["keys"]] == ["a/1", "a/2", "b"]
    assert holdfast("coord", "get", "zzz", "--prefix").stderr == "no such keys\n"


def test_create_only(address: str) -> None:
    assert holdfast("coord", "set", "once", "1", "--create").exit_code == 0
    done = holdfast("coord", "set", "once", "2", "--create")
    assert (done.exit_code, done.stdout) == (2, "")
    assert re.match(r"error: .*once", done.stderr)
    assert holdfast("coord", "get", "once").stdout == "1\n"


# ---- mistakes


@pytest.mark.parametrize("command", [("status",), ("barriers",), ("get", "k"), ("set", "k", "v")])
def test_no_coordinator_named(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_COORD", raising=False)
    done = holdfast("coord", *command)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no coordinator was named\n\nhint: give --coordinator tcp://")


@pytest.mark.parametrize("text", ["localhost:80", "tcp://x", "unix:", "http://x:1"])
def test_what_is_no_address(text: str) -> None:
    done = holdfast("coord", "status", "--coordinator", text)
    assert done.exit_code == 2
    assert text in done.stderr
    assert "\n\nhint: " in done.stderr


def test_nobody_there(tmp_path: Path) -> None:
    done = holdfast("coord", "status", "--coordinator", f"unix:{tmp_path}/none", "--timeout", "0.2")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ")


def test_a_wrong_token_another_run_and_no_token(address: str, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("another token, long enough to be one")
    for words in (("--token-file", str(wrong)), ("--run", "other")):
        done = holdfast("coord", "status", *words, "--timeout", "5")
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr.startswith("error: ")
        assert "unexpected" not in done.stderr
    done = holdfast("coord", "status", "--token-file", tmp_path / "absent")
    assert done.stderr.startswith(f"error: cannot read the token in {tmp_path}/absent: No such file")
    empty = tmp_path / "empty"
    empty.write_text("\n")
    assert "holds no token" in holdfast("coord", "status", "--token-file", empty).stderr


def test_options_that_exclude_each_other() -> None:
    done = holdfast("coord", "get", "k", "--raw", "--prefix")
    assert done.exit_code == 2
    assert "exclude each other" in done.stderr
    assert "hint: see 'holdfast coord get --help'" in done.stderr
