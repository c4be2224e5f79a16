"""Halves of saves: one part is there; the trainer of the other died before its vault knew of it."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from holdfast import journal
from holdfast.checkpoint import Checkpointer, in_flight
from holdfast.coord import Agreement
from holdfast.storage import LocalStore
from holdfast.vault import WORK, Hello, make_agreement
from holdfast.vault.commit import ORPHAN_S, part, parted
from holdfast.vault.messages import REPLIES, Bye, Reply
from holdfast.vault.session import Session
from holdfast.wire import FrameSocket
from tests.checkpoint.children import Children

pytestmark = pytest.mark.process

SOON_S = 30.0
CODE = "import sys; from tests.vault.test_halves import trainer; trainer(*sys.argv[1:])"


def trainer(folder: str, rank: str, newest: str) -> None:
    """Rank `rank` of two: saves the steps up to `newest`, says so, and waits to be killed or told to go."""
    ckpt = Checkpointer(
        folder, rank=int(rank), world=2, deadline_s=600.0, journal=f"{folder}.journal", slots=2
    )
    for step in range(1, int(newest) + 1):
        handle = ckpt.save(step, {"w": np.full(1 << 16, step, np.float32)})
        handle.staged(60.0)
        if step == 1:
            handle.durable(60.0)
    print(json.dumps({"saw": "staged"}), flush=True)
    if sys.stdin.readline():
        ckpt.close(SOON_S, drain=False)


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    started = Children(tmp_path)
    yield started
    started.end_all()


def test_a_half_is_given_up_soon_after_its_trainer_died(children: Children, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    first, second = (children.python("-c", CODE, folder, rank, newest) for rank, newest in ((0, 1), (1, 2)))
    first.until("staged")
    second.until("staged")
    assert in_flight(LocalStore(folder)) == [2]
    first.kill()
    second.kill()
    died = time.monotonic()
    while in_flight(LocalStore(folder)):
        assert time.monotonic() - died < ORPHAN_S + SOON_S, "it is waited for until the deadline"
        time.sleep(0.02)
    # Its vault writes that down after it has let go of the save.
    records = (one.event for one in journal.follow(f"{folder}.journal", timeout_s=SOON_S))
    assert next(one.step for one in records if isinstance(one, journal.SaveFailed)) == 2
    with Checkpointer(folder, rank=0, world=1, journal=False) as ckpt:
        assert ckpt.steps() == [1]


@pytest.mark.parametrize("how", ["killed", "left"])
@pytest.mark.parametrize("both", [True, False])
def test_nobody_is_waited_for_who_is_known_to_have_ended(
    how: str, both: bool, children: Children, tmp_path: Path
) -> None:
    folder = tmp_path / "ckpt"
    first, second = (children.python("-c", CODE, folder, rank, newest) for rank, newest in ((0, 1), (1, 3)))
    first.until("staged")
    second.until("staged")
    if how == "killed":
        first.kill()
    else:
        first.tell("go")
        assert first.end() == 0
    if both:
        second.kill()
    # Also the one that waited behind another, and whether or not its own trainer lives.
    records = (one.event for one in journal.follow(f"{folder}.journal", timeout_s=SOON_S))
    failed: dict[int, str] = {}
    while len(failed) < 2:
        one = next(records)
        if isinstance(one, journal.SaveFailed):  # the vault's word, and its trainer's if that lives
            failed[one.step] = one.reason
    assert failed == {step: f"rank 0 ended without a part in step {step}" for step in (2, 3)}


@pytest.mark.parametrize(
    ("words", "said"), [([], set()), ([Bye(drain=True)], set()), ([Bye(drain=False)], {1})]
)
def test_a_trainer_that_may_come_back_has_not_ended(
    words: list[object], said: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who lost its connection gives its saves to another vault. At the end of a run nobody need be told."""
    monkeypatch.setattr("holdfast.vault.session._DEATH_S", 0.0)
    agreement = serve(tmp_path, *words)
    assert parted(agreement, "s") == said


def test_nobody_to_tell_it_to_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator is gone too: whatever a session has to leave behind is left behind all the same."""
    monkeypatch.setattr("holdfast.vault.session._PART_S", 0.01)
    there, told = threading.Event(), threading.Event()

    def tell(agreement: Agreement, session: str) -> None:
        assert there.wait(SOON_S)
        part(agreement, session)
        told.set()

    monkeypatch.setattr("holdfast.vault.session.part", tell)
    agreement = serve(tmp_path, Bye(drain=False))
    assert parted(agreement, "s") == set()
    there.set()
    assert told.wait(SOON_S)
    assert parted(agreement, "s") == {1}


def serve(root: Path, *words: object) -> Agreement:
    """Rank 1 of two says hello and these words, and closes its connection; the agreement of rank 0."""
    store = LocalStore(root)
    for folder in (WORK, f"{WORK}/agreement", f"{WORK}/agreement/hello"):
        store.make_folder(*folder.split("/"))
    ours, theirs = socket.socketpair()
    frames: FrameSocket[Reply] = FrameSocket(ours, REPLIES)
    hello = Hello(
        root=str(root), rank=1, world=2, agreement="folder", threads=1, journal=None, recycle=True,
        session="s",
    )  # fmt: skip
    for word in (hello, *words):
        frames.send(word)
    frames.close()
    Session(theirs).serve()
    return make_agreement(store, "folder", 0, 2)
