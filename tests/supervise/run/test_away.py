"""A recovery whose checkpoints cannot be reached: what is in memory does without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from holdfast.errors import StorageError
from holdfast.journal import Journal
from holdfast.storage import LocalStore
from holdfast.supervise.saving import RunSaver


class Held(NamedTuple):
    step: int
    tree: Any


def test_a_store_that_is_away_does_not_keep_a_run_from_the_state_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> list[str]:
        raise StorageError("it is away", path="store")

    def restore(addresses: list[str], template: Any, *, min_step: int, **_: object) -> Held | None:
        return Held(7, template) if (addresses, min_step) == (["vault:1"], 0) else None

    monkeypatch.setattr(LocalStore, "names", away)
    monkeypatch.setattr("holdfast.vault.restore_newest", restore, raising=False)
    with Journal(tmp_path / "journal", component="test") as events:
        saver = RunSaver(tmp_path / "ckpt", run="run", events=events)
        found = saver.load({"w": np.zeros(3)}, vaults=["vault:1"])
        assert found is not None
        assert (found.steps, found.source) == (7, "vault")
        with pytest.raises(StorageError, match="it is away"):
            saver.load({"w": np.zeros(3)}, vaults=["vault:2"], wait_s=0.0)
        saver.hand_over()
