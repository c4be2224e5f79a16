"""A folder and its mirror: what is copied, what stays where, and what is read from the one or the other."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest

from holdfast import faults, journal
from holdfast.checkpoint import Checkpointer, Mirror, SaveHandle, whereabouts
from holdfast.checkpoint.tiers import MirrorTier
from holdfast.errors import CorruptError, DeadlineError, HoldfastError, MirrorError, StorageError, UsageError
from holdfast.format import BLOCK, SaveId
from holdfast.journal import (
    BlockBad,
    Cleaned,
    MirrorDraining,
    MirrorFailed,
    MirrorLeft,
    StepMirrored,
    StepPruned,
)
from holdfast.storage import Files, LocalStore, PartWriter
from holdfast.vault import accepted
from holdfast.vault.mirror import MirrorWorker
from holdfast.vault.mirror_copy import StepCopy
from tests.checkpoint.children import within
from tests.checkpoint.folder import damage, events, part_file
from tests.checkpoint.test_ranks import Ranks, together
from tests.cli.saved import answer, holdfast

SIZE = BLOCK + 5
WAIT_S = 30.0


def tree(step: int, size: int = SIZE) -> dict[str, Any]:
    return {"x": np.full(size, step % 251, np.uint8), "n": step}


def is_step(found: dict[str, Any], step: int, size: int = SIZE) -> bool:
    return found["n"] == step and np.array_equal(found["x"], tree(step, size)["x"])


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "mirror"


@pytest.fixture
def away(place: Path) -> Path:
    """The mirror, which cannot be written until this file is gone."""
    place.parent.mkdir(exist_ok=True)
    place.write_text("in the way")
    return place


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, armed: None) -> None:
    monkeypatch.setattr("holdfast.vault.mirror_plan.RETRY_S", 0.05)


def opened(root: Path, mirror: Mirror | Path, **settings: Any) -> Checkpointer:
    return Checkpointer(root, mirror=mirror, **{"writer": "thread", "rank": 0, "world": 1, **settings})


def save(ckpt: Checkpointer, *steps: int, size: int = SIZE) -> list[SaveHandle]:
    handles = []
    for step in steps:
        handles.append(ckpt.save(step, tree(step, size), meta={"samples": 10 * step}))
        handles[-1].durable(WAIT_S)
    return handles


def step_files(root: Path, step: int) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / f"step-{step:08d}").iterdir()}


def steps_of(place: Path) -> list[int]:
    return Checkpointer(place, journal=False, rank=0, world=1).steps()


# ---- copying


def test_a_mirror_gets_every_step_byte_for_byte(root: Path, place: Path) -> None:
    with opened(root, place, keep=2) as ckpt:
        for step in (1, 2, 3, 4):
            (handle,) = save(ckpt, step)
            handle.mirrored(WAIT_S)
            assert step_files(place, step) == step_files(root, step)
        ckpt.wait(WAIT_S)
    # Each place has its own retention.
    assert (steps_of(root), steps_of(place)) == ([3, 4], [2, 3, 4])
    assert [event.step for event in events(root, StepMirrored)] == [1, 2, 3, 4]
    pruned = [(event.step, event.place) for event in events(root, StepPruned)]
    assert sorted(pruned) == [(1, ""), (1, str(place)), (2, "")]
    with Checkpointer(place, journal=False) as copy:
        assert [copy.verify(step) for step in copy] == [[], [], []]


def test_every_says_which_steps_go_and_the_last_one_does(root: Path, place: Path) -> None:
    with opened(root, Mirror(place, every=100, keep=None), keep=None) as ckpt:
        handles = {handle.step: handle for handle in save(ckpt, 100, 150, 205, 290, size=64)}
        for step in (100, 205):
            handles[step].mirrored(WAIT_S)
        for step in (150, 290):
            with pytest.raises(MirrorError, match=f"step {step} is not copied to the mirror: not asked for"):
                handles[step].mirrored(WAIT_S)
        assert steps_of(place) == [100, 205]
    assert steps_of(place) == [100, 205, 290]
    with opened(root, Mirror(place, every=100, keep=None), keep=None) as ckpt:
        save(ckpt, 310, size=64)[0].mirrored(WAIT_S)
    assert steps_of(place) == [100, 205, 290, 310]


def test_the_last_step_goes_there_also_if_the_end_comes_in_the_midst_of_a_look(
    root: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    armed, waits, answer = threading.Event(), threading.Event(), MirrorWorker._answer

    def until_the_end(worker: MirrorWorker, awaited: list[SaveId]) -> None:
        answer(worker, awaited)
        if armed.is_set():
            waits.set()
            with worker._changed:
                assert worker._changed.wait_for(lambda: worker._ending is not None, WAIT_S)

    monkeypatch.setattr(MirrorWorker, "_answer", until_the_end)
    with opened(root, Mirror(place, every=100, keep=None), keep=None) as ckpt:
        save(ckpt, 100, size=64)[0].mirrored(WAIT_S)
        armed.set()
        save(ckpt, 150, size=64)
        assert waits.wait(WAIT_S)
    assert steps_of(place) == [100, 150]


def test_what_the_mirror_would_not_keep_is_not_sent(root: Path, place: Path) -> None:
    with Checkpointer(root, writer="thread", keep=None) as ckpt:
        save(ckpt, 1, 2, 3, 4, size=64)
    with opened(root, Mirror(place, keep=2), keep=None) as ckpt:
        save(ckpt, 5, size=64)[0].mirrored(WAIT_S)
    assert sorted(event.step for event in events(root, StepMirrored)) == [4, 5]
    assert steps_of(place) == [4, 5]


def test_a_pin_in_the_folder_holds_on_the_mirror(root: Path, place: Path) -> None:
    with opened(root, Mirror(place, keep=1)) as ckpt:
        save(ckpt, 1, size=64)[0].mirrored(WAIT_S)
        ckpt.pin(1)
        for step in (2, 3):
            save(ckpt, step, size=64)[0].mirrored(WAIT_S)
    assert steps_of(place) == [1, 3]


def test_a_replaced_step_replaces_its_copy(root: Path, place: Path) -> None:
    with opened(root, place) as ckpt:
        save(ckpt, 1)[0].mirrored(WAIT_S)
        asyncio.run(ckpt.save(1, tree(9), overwrite=True).until_mirrored(WAIT_S))
        assert step_files(place, 1) == step_files(root, 1)
    assert [event.step for event in events(root, StepMirrored)] == [1, 1]


def test_a_mirror_of_another_run_is_left_alone(root: Path, place: Path, tmp_path: Path) -> None:
    with opened(tmp_path / "other", place, run="other") as other:
        save(other, 1)[0].mirrored(WAIT_S)
    before = step_files(place, 1)
    with opened(root, place) as ckpt:
        with pytest.raises(MirrorError, match="another save of step 1: other/1/"):
            save(ckpt, 1)[0].mirrored(WAIT_S)
        save(ckpt, 2)[0].mirrored(WAIT_S)
    assert step_files(place, 1) == before
    (left,) = events(root, MirrorLeft)
    assert (left.step, left.place) == (1, str(place))


def test_ranks_copy_their_own_parts_and_rank_0_commits(root: Path, place: Path) -> None:
    whole = {"x": np.arange(3 * BLOCK, dtype=np.uint8).reshape(3, BLOCK), "n": 1}
    ranks = Ranks(root, 3, mirror=place)
    handles = ranks.save(1, lambda rank: whole)
    waited = together(3, lambda rank: handles[rank].mirrored(WAIT_S))
    assert waited == [None, None, None]
    ranks.close()
    assert step_files(place, 1) == step_files(root, 1)
    assert len(step_files(place, 1)) == 2 * 3 + 1


def test_what_is_being_copied_is_announced_there(
    root: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, write_part = threading.Event(), LocalStore.write_part

    def telling(store: LocalStore, *names: str, **given: Any) -> PartWriter:
        writer = write_part(store, *names, **given)
        if store.root == str(place):
            begun.set()
        return writer

    monkeypatch.setattr(LocalStore, "write_part", telling)
    mirror = Mirror(place, rate=1e3, drain_s=0.0)  # it does not get beyond the first block
    store = LocalStore(place)
    with Checkpointer(root, writer="thread", mirror=mirror) as ckpt:
        ckpt.save(1, tree(1)).durable(WAIT_S)
        assert begun.wait(WAIT_S)
        (one,) = accepted(store)
        assert (one.step, one.rank, one.copied) == (1, 0, True)
        with Checkpointer(place, writer="thread", keep=None) as other:  # it cleans up at its first save
            other.save(7, tree(7, 5)).durable(WAIT_S)
        assert part_file(place, 1).exists()
        assert not events(place, Cleaned)
    assert accepted(store) == set()
    with opened(root, place) as ckpt:
        save(ckpt, 8)[0].mirrored(WAIT_S)
    assert not list((place / ".holdfast").glob("copy-*"))


def test_what_a_dead_vault_left_is_swept(root: Path, place: Path) -> None:
    with opened(root, place) as ckpt:
        save(ckpt, 1, 2)[1].mirrored(WAIT_S)
    half = place / "step-00000001"
    (half / "manifest.json").unlink()
    (half / "notes.txt").write_text("not ours")
    shutil.rmtree(root / "step-00000001")
    with opened(root, place) as ckpt:
        save(ckpt, 3)[0].mirrored(WAIT_S)
    assert [path.name for path in half.iterdir()] == ["notes.txt"]
    assert len(events(root, Cleaned)) == 2


# ---- a mirror that fails, is slow, comes back


def test_a_mirror_that_is_away_stops_nothing_and_is_made_up_for(
    root: Path, away: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.vault.mirror_plan.LONGEST_S", 0.1)  # a try in every wait below
    with opened(root, away, keep=None) as ckpt:
        handles = save(ckpt, 1, 2, 3)
        tried = (record.event for record in journal.follow(root / "journal.jsonl", timeout_s=WAIT_S))
        assert any(isinstance(event, MirrorFailed) and event.step == 3 for event in tried)
        with pytest.raises(DeadlineError, match=r"step 3 is not on the mirror after 0\.5 s; copying fails: "):
            handles[2].mirrored(0.5)
        away.unlink()
        for handle in handles:
            handle.mirrored(WAIT_S)
    failures = events(root, MirrorFailed)
    assert failures[-1].step == 3  # the newest is tried first
    assert [event.step for event in events(root, StepMirrored)] == [3, 2, 1]


def test_steps_that_are_due_are_held_here_if_asked_for(root: Path, away: Path) -> None:
    with opened(root, Mirror(away, hold_local=True), keep=1) as ckpt:
        handles = save(ckpt, 1, 2, 3, size=64)
        ckpt.wait(WAIT_S)
        assert ckpt.prune(dry_run=True) == []
        assert steps_of(root) == [1, 2, 3]
        away.unlink()
        for handle in handles:
            handle.mirrored(WAIT_S)
        ckpt.wait(WAIT_S)
        assert steps_of(root) == [3]


def test_who_waits_for_the_copy_has_its_upkeep_before_him(
    root: Path, away: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[bool] = []
    with opened(root, away) as ckpt:
        (handle,) = save(ckpt, 1, size=64)

        def noticing(self: MirrorTier, step: int) -> None:
            with pytest.raises(DeadlineError):
                handle.mirrored(0.0)
            waiting.append(True)

        monkeypatch.setattr(MirrorTier, "mirrored", noticing)
        away.unlink()
        handle.mirrored(WAIT_S)
        assert waiting


def test_a_step_that_was_pruned_first_is_said_to_be(root: Path, away: Path) -> None:
    with opened(root, Mirror(away, drain_s=0.0), keep=1) as ckpt:
        first, _ = save(ckpt, 1, 2, size=64)
        ckpt.wait(WAIT_S)
        with pytest.raises(MirrorError, match="pruned or replaced before it was copied"):
            first.mirrored(WAIT_S)


def test_a_slow_mirror_holds_up_neither_saves_nor_the_end(root: Path, place: Path) -> None:
    slow = Mirror(place, rate=BLOCK / 40, drain_s=0.3)  # a block takes 40 s
    ckpt = opened(root, slow, keep=None)
    with within(30.0):
        handles = save(ckpt, 1, 2, 3)
        with pytest.raises(
            DeadlineError, match=r"not on the mirror after 0.1 s$|not on the mirror after 0.1 s\n"
        ):
            handles[2].mirrored(0.1)
        ckpt.close()
    with pytest.raises(MirrorError, match="this run ended"):
        handles[2].mirrored(WAIT_S)
    (draining,) = events(root, MirrorDraining)
    assert draining.timeout_s <= 0.3
    assert {event.step for event in events(root, MirrorLeft)} >= {2, 3}
    assert 3 not in steps_of(place)
    # The next run has nothing to save, and still brings the mirror up to date.
    with opened(root, Mirror(place, keep=None), keep=None) as ckpt:
        save(ckpt, 4)[0].mirrored(WAIT_S)
    assert steps_of(place) == [1, 2, 3, 4]
    assert step_files(place, 2) == step_files(root, 2)


def test_damage_here_never_becomes_damage_there(root: Path, away: Path) -> None:
    with opened(root, away) as ckpt:
        (handle,) = save(ckpt, 1)
        damage(part_file(root, 1), BLOCK + 5)
        away.unlink()
        with pytest.raises(MirrorError, match=r"block 1 .* is damaged"):
            handle.mirrored(WAIT_S)
        save(ckpt, 2)[0].mirrored(WAIT_S)
    assert steps_of(away) == [2]
    (bad,) = events(root, BlockBad)
    assert (bad.block, bad.arrays) == (1, ("x",))
    assert [event.step for event in events(root, MirrorLeft)] == [1]


def test_what_is_overwritten_after_it_was_pruned_is_no_damage(
    root: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give(self: StepCopy) -> int:
        (root / "step-00000001" / "manifest.json").unlink(missing_ok=True)
        raise CorruptError("other bytes", file="part", block=0, arrays=())

    monkeypatch.setattr(StepCopy, "give", give)
    with opened(root, place) as ckpt, pytest.raises(MirrorError, match="pruned or replaced"):
        save(ckpt, 1)[0].mirrored(WAIT_S)
    assert not events(root, BlockBad)


def test_a_defect_in_copying_is_told_and_does_not_end_it(root: Path, place: Path) -> None:
    faults.arm("mirror.part:raise@1")
    with opened(root, place) as ckpt:
        save(ckpt, 1)[0].mirrored(WAIT_S)
    (failed,) = events(root, MirrorFailed)
    assert failed.reason == "RuntimeError: injected at mirror.part"


# ---- reading


def mirrored(root: Path, place: Path, *steps: int) -> None:
    with opened(root, place) as ckpt:
        for handle in save(ckpt, *steps):
            handle.mirrored(WAIT_S)


def test_a_lost_folder_is_restored_from_the_mirror(root: Path, place: Path) -> None:
    mirrored(root, place, 1, 2)
    shutil.rmtree(root)
    with opened(root, place) as ckpt:
        assert ckpt.steps() == [1, 2]
        assert ckpt.info().step == 2
        assert ckpt.metadata(1) == {"samples": 10}
        assert ckpt.verify() == []
        assert is_step(ckpt.load(init=lambda: pytest.fail("a run must not begin again")), 2)
        assert ckpt.last_load is not None
        assert dict(ckpt.last_load.blocks) == {str(place): 2}
        save(ckpt, 3)[0].mirrored(WAIT_S)
        assert is_step(ckpt.load(), 3)
        assert ckpt.last_load is not None
        assert dict(ckpt.last_load.blocks) == {str(root): 2}
    assert steps_of(place) == [1, 2, 3]


@pytest.mark.parametrize("what", ["block", "part", "index", "manifest"])
def test_what_is_bad_here_is_read_from_the_mirror(
    what: str, root: Path, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mirrored(root, place, 1, 2)
    part = part_file(root, 2)
    match what:
        case "block":
            damage(part, BLOCK + 5)
        case "part":
            part.unlink()
        case "index":
            damage(next(part.parent.glob("*.index.json")), 50)
        case _:
            damage(part.parent / "manifest.json", 50)
    with opened(root, place) as ckpt:
        assert is_step(ckpt.load(), 2)
        report = ckpt.last_load
    assert report is not None
    assert report.step == 2
    repaired = {"block": 1, "part": 2, "index": 0, "manifest": 0}[what]
    assert report.repaired == repaired
    if what == "block":
        assert dict(report.blocks) == {str(root): 1, str(place): 1}
    if repaired:
        assert f"step 2: {repaired} blocks were read from another place" in caplog.text
        assert {event.file for event in events(root, BlockBad)} == {str(root / part.name)}
    else:
        assert str(place) in caplog.text


@final
class Unplugged(Files):
    """A disk that cannot be read."""

    def names(self, path: str) -> list[str]:
        raise OSError(errno.EIO, "unplugged")

    def open_read(self, path: str) -> int:
        raise OSError(errno.EIO, "unplugged")


def unplug(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    for name in ("glanced", "opened"):
        monkeypatch.setattr(Mirror, name, lambda self: LocalStore(place, files=Unplugged()))


def test_a_mirror_that_is_away_is_no_reason_not_to_load(
    root: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirrored(root, place, 1, 2)
    unplug(monkeypatch, place)
    with opened(root, place) as ckpt:
        assert is_step(ckpt.load(init=lambda: None), 2)
        assert ckpt.steps() == [1, 2]
        damage(part_file(root, 2))
        assert is_step(ckpt.load(), 1)


def test_a_run_does_not_begin_again_because_its_mirror_is_away(
    root: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirrored(root, place, 1)
    shutil.rmtree(root)
    unplug(monkeypatch, place)
    with opened(root, place) as ckpt, pytest.raises(StorageError, match="unplugged"):
        ckpt.load(init=lambda: pytest.fail("it began again"))


# ---- where a step lies


def test_whereabouts(root: Path, place: Path, tmp_path: Path) -> None:
    mirrored(root, place, 1, 2)
    shutil.rmtree(root / "step-00000001")
    found = whereabouts(LocalStore(root))
    assert found.steps == {str(place): [1, 2]}
    assert found.of(1) == [str(place)]
    assert found.problems == {}


def test_a_listing_says_where_each_step_lies(root: Path, place: Path) -> None:
    mirrored(root, place, 1, 2)
    shutil.rmtree(root / "step-00000001")
    shown = holdfast("ckpt", "ls", root)
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert [line.split()[-2] for line in lines[:3]] == ["WHERE", "mirror", "folder+mirror"]
    assert lines[3] == f"mirror: {place}"
    steps = answer("ckpt", "ls", root)["steps"]
    assert [step["places"] for step in steps] == [[str(place)], [str(root), str(place)]]
    # A mirror has no mirror.
    assert "WHERE" not in holdfast("ckpt", "ls", place).stdout


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"rate": 0.0}, "rate=0.0"),
        ({"drain_s": -1.0}, "drain_s=-1.0"),
        ({"keep": 0}, "a positive whole number"),
    ],
)
def test_wrong_settings_show_at_once(settings: dict[str, Any], message: str, root: Path, place: Path) -> None:
    with pytest.raises(UsageError, match=message):
        opened(root, Mirror(place, **settings))


def test_wrong_places_show_at_once(root: Path) -> None:
    for place in (root, root / "mirror", "ftp://nowhere/run"):
        with pytest.raises(HoldfastError, match=r"is no mirror of|is no place that Holdfast knows"):
            Checkpointer(root, mirror=place)


def test_waiting_for_a_mirror_that_is_not_there(root: Path) -> None:
    with Checkpointer(root, writer="thread") as ckpt:
        handle = ckpt.save(1, tree(1))
        with pytest.raises(UsageError, match="has no mirror"):
            handle.mirrored(WAIT_S)
