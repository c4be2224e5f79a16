"""The examples work alone and as workers, with the same last line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.supervise.run.stage import Stage

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def alone(name: str, steps: int, folder: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), str(steps)],
        cwd=folder,
        env={**environment, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


# The same with JAX is in every run of the tests as a whole engine: tests/train/test_launched.py.
@pytest.mark.parametrize(
    "name", ["replicas_numpy.py", pytest.param("replicas_jax.py", marks=pytest.mark.full)]
)
def test_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    expected = alone(name, 40, tmp_path)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    with Stage(tmp_path / "run", "40", replicas=2, script=EXAMPLES / name, out=False) as stage:
        (parked,) = stage.park("")
        first, victim = stage.start("", "run.added:kill@21")
        stage.gone(victim)
        stage.activate(parked, 1, attempt=1)
        assert stage.gone(first) == 0
        assert stage.gone(parked) == 0
        assert first.output().splitlines()[-1] == expected
        assert parked.output().splitlines()[-1] == expected


@pytest.mark.full
def test_one_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone("one_world.py", 60, tmp_path)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    with Stage(tmp_path / "run", "60", replicas=1, script=EXAMPLES / "one_world.py", out=False) as stage:
        (victim,) = stage.start("run.step:kill@56")
        stage.gone(victim)
        (again,) = stage.start()
        assert stage.gone(again) == 0
        assert again.output().splitlines()[-1] == expected
