"""What workers of a run share: a key, and what they agreed on."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

import holdfast


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
    token = tmp_path / "runs" / "one" / "token"
    assert stat.S_IMODE(os.stat(token).st_mode) == 0o600
    assert token.read_bytes() not in keys
    assert sorted(path.name for path in token.parent.glob("token*")) == ["token"]
