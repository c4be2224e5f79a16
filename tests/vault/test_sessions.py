"""A session of a standing vault that ends as none should, while its trainer lives and goes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import Checkpointer
from holdfast.errors import HoldfastError
from holdfast.vault import ServeAt, VaultWriter, restore, server
from holdfast.vault.session import Session
from tests.vault.nodes import await_offered, await_that
from tests.vault.trainer import RUN, TOKEN

SOON_S = 30.0


@pytest.fixture
def vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """The socket and the address of a standing vault, on a thread of this process."""
    monkeypatch.setattr(server, "_yield_to_trainers", lambda: None)
    path, stop = str(tmp_path / "vault.sock"), threading.Event()
    standing = server.Standing(keep=2, serve=ServeAt("127.0.0.1:0", RUN, TOKEN))
    thread = threading.Thread(target=server.serve_listening, args=(path, standing), kwargs={"stop": stop})
    thread.start()
    await_that(lambda: os.path.exists(f"{path}.address"))
    yield path, Path(f"{path}.address").read_text().strip()
    stop.set()
    thread.join(SOON_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nothing_is_offered_out_of_memory_that_a_living_trainer_writes(
    vault: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, address = vault
    stage, num_staged = Session._stage, 0

    def failing(self: Session, seq: int) -> None:
        nonlocal num_staged
        num_staged += 1
        if num_staged == 2:
            raise RuntimeError("what nobody thought of")
        stage(self, seq)

    monkeypatch.setattr(Session, "_stage", failing)
    seen: list[Any] = []
    staged = VaultWriter.staged

    def written(self: VaultWriter, seq: int) -> Any:
        """All of the next state is in its slot: what is there before may not be had any more, or is whole."""
        for step in (1, 2):
            try:
                found = restore([address], token=TOKEN, run=RUN, step=step)
            except HoldfastError:
                continue
            seen.append((step, np.unique(found.tree["w"]).tolist()))
        return staged(self, seq)

    settings: dict[str, Any] = {"slots": 2, "serve": "127.0.0.1:0", "run": RUN, "token": TOKEN}
    with Checkpointer(tmp_path / "root", writer=path, rank=0, world=1, **settings) as ckpt:
        ckpt.save(1, {"w": np.full(1 << 20, 1, np.float32)}).durable(SOON_S)
        with suppress(HoldfastError):  # its session ended; whether it was staged by then is not the question
            ckpt.save(2, {"w": np.full(1 << 20, 2, np.float32)}).durable(SOON_S)
        monkeypatch.setattr(VaultWriter, "staged", written)
        for step in (3, 4):
            ckpt.save(step, {"w": np.full(1 << 20, step, np.float32)}).durable(SOON_S)
        await_offered(address, 4)
        found = restore([address], token=TOKEN, run=RUN)
    assert all(values == [step] for step, values in seen), seen
    assert found.step == 4
    assert np.unique(found.tree["w"]).tolist() == [4.0]
