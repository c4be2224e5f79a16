"""What workers of a run share: a key, and what they agreed on."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.errors import KeyExistsError, StorageError, UsageError
from holdfast.launch.plan import LaunchSettings, agent_config
from holdfast.supervise import joining
from holdfast.supervise.agent_worker import _environment
from holdfast.supervise.members import Place
from holdfast.supervise.messages import Seat
from holdfast.supervise.run import Parts, Run, RunInfo
from holdfast.supervise.secret import run_token


def test_a_run_of_one_has_the_same_key_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keys = []
    for _ in range(2):
        with holdfast.join(name="one") as run:
            keys.append(run.key)
            run.agree("step", "abc")
    with holdfast.join(name="other") as other:
        keys.append(other.key)
    assert keys[0] == keys[1] != keys[2]
    assert len(keys[0]) == 32
    token = tmp_path / "runs" / "one" / "coord" / "token"
    assert stat.S_IMODE(os.stat(token).st_mode) == 0o600
    assert token.read_bytes() not in keys
    assert sorted(path.name for path in token.parent.glob("token*")) == ["token"]


def test_a_launch_of_a_run_of_one_has_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the one has sealed, such as its executables, the other opens."""
    with holdfast.join(name="one", folder=tmp_path) as run:
        alone = run.key
    given = SimpleNamespace(folder=tmp_path / "one", token=run_token(tmp_path / "one").encode())
    monkeypatch.setattr(joining, "inheritance", lambda: given)
    assert joining.keeping() == (tmp_path / "one", alone)


def test_of_two_that_start_at_once_one_makes_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    link = os.link

    def late(new: Path, path: Path) -> None:
        if not made:
            made.append("")
            made.append(run_token(tmp_path))
        link(new, path)

    # Two processes. Only there: threads that others left behind ask for theirs, too.
    played = SimpleNamespace(**{**vars(os), "link": late, "getpid": iter(range(1, 9)).__next__})
    monkeypatch.setattr("holdfast.supervise.secret.os", played)
    assert run_token(tmp_path) == made[1] == run_token(tmp_path)
    assert os.listdir(tmp_path / "coord") == ["token"]
    (tmp_path / "coord" / "token").write_text("")
    assert len(run_token(tmp_path)) == 64


class Keys:
    """The keys of a coordinator that outlives a launch."""

    def __init__(self) -> None:
        self.client = self
        self._kept: dict[str, bytes] = {}

    def set(self, key: str, value: bytes, *, create: bool) -> None:
        assert create
        if key in self._kept:
            raise KeyExistsError(f"{key} is there")
        self._kept[key] = value

    def get(self, key: str) -> bytes | None:
        return self._kept.get(key)


def worker(keys: Any, launch: str) -> Run:
    info = RunInfo(name="a", folder=Path("a"), place=Place(Seat(0, 0, 0), 1, 1, 8), launch=launch)
    nothing: Any = None
    return Run(info, Parts(board=nothing, events=nothing, saver=nothing, members=keys))


def test_workers_of_one_launch_go_by_the_value_of_the_first() -> None:
    keys = Keys()
    first, second, later = worker(keys, "x"), worker(keys, "x"), worker(keys, "y")
    assert [first.agreed("from", "200"), second.agreed("from", "100")] == ["200", "200"]
    first.agree("config", "abc")
    second.agree("config", "abc")
    with pytest.raises(UsageError, match="this worker has config = 'def', the run goes by 'abc'"):
        second.agree("config", "def")
    # The next launch may find the same coordinator, and has settings of its own.
    later.agree("config", "def")
    assert later.agreed("from", "100") == "100"


@pytest.mark.process
def test_nothing_is_made_beside_a_state_that_is_found(tmp_path: Path) -> None:
    made: list[int] = []

    def init() -> dict[str, Any]:
        made.append(1)
        return {"w": np.zeros(3)}

    state: dict[str, Any] = {}
    for started in (1, 2):
        with holdfast.join(name="one", folder=tmp_path) as run:
            into = {"w": np.empty(3)}
            state = run.restore(init, into=into, steps=lambda first: 4 + int(first["w"][0]))
            assert run.step == 3 + started
            assert made == [1]
            for step in run.steps(until=4 + started):
                state = {"w": state["w"] + 1}
                step.done(state)
    assert state["w"].tolist() == [2.0, 2.0, 2.0]


def test_workers_are_told_which_launch_they_are_of(tmp_path: Path) -> None:
    settings = LaunchSettings(
        script=(__file__,), folder=str(tmp_path), environment={"HOLDFAST_LAUNCH": "old"}
    )
    config = agent_config(settings, 0, "t" * 32, "new")
    assert "HOLDFAST_LAUNCH" not in config.env
    assert _environment(config, control=3, board=4, token=5)["HOLDFAST_LAUNCH"] == "new"


def test_a_run_of_one_that_cannot_keep_anything_says_so_in_one_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(StorageError, match="cannot keep a run in") as told:
        holdfast.join(name="one", folder=tmp_path / "runs")
    assert told.value.__suppress_context__
