"""Checkpoints on an object store: the same promises as in a folder, without its locks."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from holdfast import faults
from holdfast.checkpoint import Checkpointer, in_flight, leftovers, upkeep
from holdfast.errors import (
    AgreementError,
    CorruptError,
    LeaseError,
    NoCheckpointError,
    SaveError,
    StepExistsError,
    StorageError,
    UnfitStoreError,
    UsageError,
)
from holdfast.format import MANIFEST, SaveId, data_name, step_folder
from holdfast.storage import Store, StoreOptions, opened
from holdfast.storage.beats import _BeatHold
from holdfast.vault import WORK
from holdfast.vault.intents import announce
from tests.checkpoint.test_ranks import Ranks
from tests.checkpoint.test_ranks import tree as ranks_tree
from tests.storage.objects import FaultyStore, Stall, corrupt, reset, status, unconditional

BLOCK = 8 << 20


@pytest.fixture
def place() -> str:
    """A store in memory: what a real one adds is in tests/storage."""
    return f"memory://{uuid.uuid4().hex}/run"


def tree(value: int, size: int = 1000) -> dict[str, Any]:
    return {"w": np.full(size, value, np.uint8), "step": value}


def checkpointer(place: str, **settings: Any) -> Checkpointer:
    return Checkpointer(place, **{"writer": "thread", "rank": 0, "world": 1, **settings})


def check_whole(place: str, steps: list[int]) -> None:
    """Fail unless the store holds these steps, each whole, and nothing else of any save."""
    store = opened(place)
    with checkpointer(place) as ckpt:
        assert ckpt.steps() == steps
        assert [ckpt.verify(step) for step in steps] == [[] for _ in steps]
    assert leftovers(store) == []
    assert store.uploads() == []
    assert in_flight(store) == []
    assert {names[0] for names in store.walk()} - {WORK} == {step_folder(step) for step in steps}
    assert {names[1] for names in store.walk() if names[0] == WORK} <= {
        "agreement",
        "fences",
        "clock",
        "pins",
    }


# ---- through the same verbs as a folder


@pytest.fixture(params=["memory", "s3"])
def anywhere(request: pytest.FixtureRequest, place: str) -> str:
    if request.param == "memory":
        return place
    faulty: FaultyStore = request.getfixturevalue("faulty")
    return faulty.url("a/run")


def test_save_load_replace_and_retain(anywhere: str) -> None:
    with checkpointer(anywhere, keep=2) as ckpt:
        with pytest.raises(NoCheckpointError):
            ckpt.load(wait_s=0.0)
        assert ckpt.load(init=lambda: "fresh") == "fresh"
        for step in (1, 2, 3):
            ckpt.save(step, tree(step), meta={"samples": step}).durable(60.0)
        ckpt.wait(60.0)
        assert ckpt.steps() == [2, 3]
        assert ckpt.metadata() == {"samples": 3}
        assert (ckpt.load(into=tree(0))["w"] == 3).all()
        with pytest.raises(StepExistsError):
            ckpt.save(3, tree(9)).durable(60.0)
        ckpt.save(3, tree(9), overwrite=True).durable(60.0)
        assert (ckpt.load()["w"] == 9).all()
        ckpt.pin(2)
        ckpt.save(4, tree(4)).durable(60.0)
        ckpt.save(5, tree(5)).durable(60.0)
        ckpt.wait(60.0)
        assert ckpt.steps() == [2, 4, 5]
    check_whole(anywhere, [2, 4, 5])


def test_only_the_ranges_that_are_needed_are_read(place: str) -> None:
    names = [f"layer{number}" for number in range(4)]
    state = {name: np.full(BLOCK, number, np.uint8) for number, name in enumerate(names)}
    with checkpointer(place) as ckpt:
        ckpt.save(1, state).durable(60.0)
        found = ckpt.load(parts="layer2")
        assert (found["layer2"] == 2).all()
        assert ckpt.last_load is not None
        assert ckpt.last_load.nbytes == BLOCK
        assert ckpt.last_load.bytes_read <= 3 * BLOCK  # of four and a bit


def test_ranks_agree_through_the_store(place: str) -> None:
    """Without a coordinator: the store's own create-if-absent decides."""
    ranks = Ranks(place, 2)  # type: ignore[arg-type]
    for step in (1, 2):
        found = ranks.save(step, lambda rank, step=step: ranks_tree(step))  # type: ignore[misc]
        assert not [one for one in found if isinstance(one, Exception)]
    ranks.close()
    with checkpointer(place) as ckpt:
        assert ckpt.info(2).num_parts == 2
        assert (ckpt.load(into=ranks_tree(0))["x"] == 2).all()  # two writers, one reader
        assert ckpt.verify(2) == []


def test_a_rank_that_fails_takes_nothing_with_it(place: str) -> None:
    ranks = Ranks(place, 2)  # type: ignore[arg-type]
    ranks.save(1, lambda rank: ranks_tree(1))
    found = ranks.save(2, lambda rank: ranks_tree(2 + rank))
    assert all(isinstance(one, AgreementError) for one in found), found
    ranks.save(3, lambda rank: ranks_tree(3))
    ranks.close()
    check_whole(place, [1, 3])


def test_a_vault_cannot_reach_memory(place: str) -> None:
    with pytest.raises(UsageError, match="memory of this process"):
        Checkpointer(place)


def test_two_runs_do_not_share_a_place(place: str) -> None:
    options = StoreOptions(hold_s=0.6)
    with checkpointer(place, store=options) as ckpt:
        ckpt.save(1, tree(1)).durable(60.0)
        with pytest.raises(LeaseError, match="is being written by process"):
            checkpointer(place, store=options).save(2, tree(2))
    with checkpointer(place) as ckpt:
        ckpt.save(2, tree(2)).durable(60.0)


def test_a_run_that_was_taken_over_neither_saves_nor_prunes(place: str) -> None:
    with checkpointer(place, keep=None) as ckpt:
        ckpt.save(1, tree(1)).durable(60.0)
        hold = ckpt._saver and ckpt._saver._lease._hold
        assert isinstance(hold, _BeatHold)
        other = msgspec.structs.replace(hold._record, life="another")  # while this process was stopped
        hold._bucket.put(hold._key, msgspec.json.encode(other))
        hold.beat()
        assert isinstance(ckpt.save(2, tree(2)).error, LeaseError)
        with pytest.raises(LeaseError, match="was taken over"):
            ckpt.prune()
    assert opened(place).names(step_folder(2)) == []


# ---- a step that two want


def test_a_step_replaced_by_another_meanwhile_is_not_replaced_again(place: str, armed: None) -> None:
    """The if-match put: what was looked at before the upload must still lie there at the commit."""
    store = opened(place)
    with checkpointer(place) as ckpt:
        ckpt.save(1, tree(1)).durable(60.0)
        theirs = store.read(step_folder(1), MANIFEST, max_bytes=1 << 20)
        with _stopped(ckpt, 1, tree(2), overwrite=True) as (handle, go_on):
            assert store.replace(step_folder(1), MANIFEST, data=theirs + b" ")
            go_on()
            with pytest.raises(StepExistsError, match="another run committed step 1"):
                handle.durable(60.0)
        assert store.read(step_folder(1), MANIFEST, max_bytes=1 << 20) == theirs + b" "


class _stopped:
    """A save that stops right before its commit, until told to go on."""

    def __init__(self, ckpt: Checkpointer, step: int, state: Any, **options: Any) -> None:
        self._ckpt, self._save = ckpt, (step, state, options)
        self._reached, self._go = threading.Event(), threading.Event()

    def __enter__(self) -> Any:
        from holdfast.vault.commit import Commit

        self._commit, original = Commit, Commit._decide

        def stopped(commit: Commit) -> Any:
            found = original(commit)
            self._reached.set()
            assert self._go.wait(60.0)
            return found

        self._original = original
        Commit._decide = stopped  # type: ignore[assignment, method-assign]
        step, state, options = self._save
        handle = self._ckpt.save(step, state, **options)
        assert self._reached.wait(60.0)
        return handle, self._go.set

    def __exit__(self, *_: object) -> None:
        self._go.set()
        self._commit._decide = self._original  # type: ignore[method-assign]


# ---- what the dead leave, and what the living keep


def _cleaned(store: Store) -> list[str]:
    found: list[str] = []
    upkeep.clean(store, lambda path, reason: found.append(path))
    return found


def test_the_parts_of_a_live_writer_stay(place: str) -> None:
    store = opened(place)
    with checkpointer(place) as ckpt:
        with _stopped(ckpt, 1, tree(1)) as (handle, go_on):
            assert in_flight(store) == [1]
            assert _cleaned(store) == []
            go_on()
            handle.durable(60.0)
        assert in_flight(store) == []
    check_whole(place, [1])


def test_a_writer_taken_for_dead_cannot_commit(place: str) -> None:
    """Its parts are gone: the fence, not luck, keeps it from making a step of them."""
    store = opened(place)
    with checkpointer(place) as ckpt:
        with _stopped(ckpt, 1, tree(1)) as (handle, go_on):
            for name in store.names(WORK):
                if name.startswith("intent-"):
                    store.remove(WORK, name)  # as if it had given no sign of life for long
            assert len(_cleaned(store)) == 2
            go_on()
            with pytest.raises(AgreementError, match="no sign of life"):
                handle.durable(60.0)
        assert ckpt.steps() == []
        ckpt.save(2, tree(2)).durable(60.0)
    check_whole(place, [2])


def test_a_save_that_is_being_committed_is_not_revoked(place: str) -> None:
    """Claimed and then silent: it may be committed any moment, so its parts are left for a day."""
    from holdfast.vault.intents import claim, revoke

    store = opened(place)
    save = SaveId("run", 1, "a-1")
    store.create(step_folder(1), data_name(0, "a-1"), data=b"x")
    claim(store, save)
    assert not revoke(store, 1, "a-1")
    assert _cleaned(store) == []
    assert store.exists(step_folder(1), data_name(0, "a-1"))
    assert revoke(store, 1, "b-1")
    with pytest.raises(AgreementError):
        claim(store, SaveId("run", 1, "b-1"))


def test_leftovers_are_those_of_no_commit_and_no_live_writer(place: str) -> None:
    store = opened(place)
    with checkpointer(place) as ckpt:
        ckpt.save(1, tree(1)).durable(60.0)
    store.create(step_folder(1), data_name(0, "dead-1"), data=b"x")
    store.create(step_folder(2), data_name(0, "dead-2"), data=b"x")
    store.create(step_folder(3), data_name(0, "live-1"), data=b"x")
    store.create(step_folder(1), "notes.txt", data=b"not ours")
    intent = announce(store, SaveId("run", 3, "live-1"))
    assert in_flight(store) == [3]
    dead = [(step_folder(1), data_name(0, "dead-1")), (step_folder(2), data_name(0, "dead-2"))]
    assert sorted(leftovers(store)) == dead
    assert sorted(_cleaned(store)) == ["/".join(names) for names in dead]
    assert store.exists(step_folder(3), data_name(0, "live-1"))
    assert store.exists(step_folder(1), "notes.txt")
    intent.close()
    assert _cleaned(store) == [f"{step_folder(3)}/{data_name(0, 'live-1')}"]


@pytest.fixture
def quick(faulty: FaultyStore) -> Iterator[Checkpointer]:
    with checkpointer(faulty.url("run"), store=faulty.options()) as ckpt:
        yield ckpt


# ---- a store in trouble


def test_a_save_and_a_load_go_on_through_trouble(faulty: FaultyStore, quick: Checkpointer) -> None:
    quick.save(1, tree(1)).durable(60.0)
    for fault in (status(500), status(503, "SlowDown"), reset()):
        for target in ("safetensors", "index", "manifest", "intent", "fences"):
            faulty.fail("PUT", target, fault)
            faulty.fail("HEAD", target, fault)
    quick.save(2, tree(2)).durable(60.0)
    for fault in (status(500), reset(body=True), reset()):
        for target in ("safetensors", "index", "manifest", "list-type"):
            faulty.fail("GET", target, fault)
    assert (quick.load()["w"] == 2).all()


@pytest.mark.parametrize("fault", [status(500, after=True), reset(after=True)], ids=["500", "reset"])
def test_a_commit_whose_answer_was_lost_is_a_commit(
    faulty: FaultyStore, quick: Checkpointer, fault: Any
) -> None:
    faulty.fail("PUT", "manifest", fault)
    quick.save(1, tree(1)).durable(60.0)
    faulty.fail("PUT", "manifest", fault)
    quick.save(1, tree(2), overwrite=True).durable(60.0)
    assert (quick.load()["w"] == 2).all()


def test_a_store_that_is_away_fails_the_save_and_not_the_run(faulty: FaultyStore) -> None:
    options = faulty.options(retry_s=0.5)
    store = opened(faulty.url("run"), options)
    with checkpointer(faulty.url("run"), store=options) as ckpt:
        ckpt.save(1, tree(1)).durable(60.0)
        faulty.fail("PUT", "part", status(500), times=10_000, skip=1)
        faulty.fail("POST", "delete", status(500), times=10_000)
        with pytest.raises((StorageError, SaveError), match="told to"):
            ckpt.save(2, tree(2)).durable(60.0)
        assert len(leftovers(store)) == 1  # it could not remove its part
        for method in ("PUT", "GET", "HEAD", "POST"):
            faulty.fail(method, "", status(500), times=10_000)
        with pytest.raises((StorageError, SaveError), match="told to"):
            ckpt.save(2, tree(2)).durable(60.0)
        faulty.proxy.heal()
        assert ckpt.steps() == [1]
        ckpt.save(3, tree(3)).durable(60.0)
        ckpt.wait(60.0)
        assert leftovers(store) == []  # nor had it to wait for the next start
    check_whole(faulty.url("run"), [1, 3])


def test_damage_on_the_way_is_found(faulty: FaultyStore, quick: Checkpointer) -> None:
    quick.save(1, tree(1, 100_000)).durable(60.0)
    faulty.fail("GET", "safetensors", corrupt, times=100)
    with pytest.raises(CorruptError) as caught:
        quick.load(step=1)
    assert caught.value.arrays == ("w",)
    (problem, *_) = quick.verify(1)
    assert "part-00000" in problem.file
    faulty.proxy.heal()
    assert quick.verify(1) == []


def test_a_store_without_conditions_is_refused_before_the_first_save(faulty: FaultyStore) -> None:
    faulty.fail("PUT", "", unconditional, times=10_000)
    with checkpointer(faulty.url("run")) as ckpt, pytest.raises(UnfitStoreError, match="only if absent"):
        ckpt.save(1, tree(1))
    assert opened(faulty.url("run")).names() == []


def test_a_stalled_upload_is_a_live_one(faulty: FaultyStore) -> None:
    """While a request of it hangs, nobody takes its upload away; after the timeout it goes on."""
    store = opened(faulty.url("run"))
    stall = Stall()
    with checkpointer(faulty.url("run"), store=faulty.options(timeout_s=4.0, retry_s=20.0)) as ckpt:
        faulty.fail("PUT", "partNumber=1", stall)
        handle = ckpt.save(1, tree(1, BLOCK + 1))
        assert stall.reached.wait(30.0)
        assert len(store.uploads()) == 1
        assert _cleaned(store) == []
        assert len(store.uploads()) == 1
        stall.release()
        handle.durable(60.0)
    check_whole(faulty.url("run"), [1])


def test_faults_of_the_vault_leave_nothing(place: str, armed: None) -> None:
    with checkpointer(place) as ckpt:
        for site in ("vault.block.written", "vault.voted", "vault.decided"):
            faults.arm(f"{site}:eio")
            with pytest.raises((StorageError, SaveError), match="injected"):
                ckpt.save(1, tree(1)).durable(60.0)
            faults.disarm()
        ckpt.save(1, tree(1)).durable(60.0)
    check_whole(place, [1])


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8))
def test_saves_through_random_trouble(faulty: FaultyStore, seed: int) -> None:
    """Whatever goes wrong: what was said to be durable is there to the bit, and the rest is not there."""
    dice = random.Random(seed)
    kinds = [
        status(500),
        status(500, after=True),
        status(503, "SlowDown"),
        reset(),
        reset(after=True),
        reset(body=True),
        status(409, "ConditionalRequestConflict"),
    ]
    stall, stalled = Stall(), random.Random(f"stall {seed}")  # one for each seed: it takes its timeout
    held = stalled.randrange(1, 9)
    durable: dict[int, int] = {}
    with checkpointer(faulty.url("run"), keep=None, store=faulty.options(retry_s=3.0)) as ckpt:
        ckpt.save(0, tree(0)).durable(60.0)
        durable[0] = 0
        for number in range(1, 9):
            for _ in range(dice.randrange(8)):
                method = dice.choice(["PUT", "PUT", "PUT", "GET", "HEAD", "POST"])
                target = dice.choice(["", "safetensors", "manifest", "index", "fences", "intent"])
                faulty.fail(method, target, dice.choice(kinds), times=dice.choice([1, 1, 2, 30]))
            if number == held:
                faulty.fail(stalled.choice(["PUT", "PUT", "GET", "POST"]), "", stall)
            step = number if dice.random() < 0.7 else dice.choice(list(durable))
            size = dice.choice([1000, 1000, 1000, BLOCK + 1])
            try:
                ckpt.save(step, tree(number, size), overwrite=True).durable(120.0)
                durable[step] = number
            except (StorageError, SaveError, AgreementError, StepExistsError):
                faulty.proxy.heal()
                # Not said to be durable: it may have been committed all the same, but only as a whole.
                if step in ckpt.steps():
                    found = ckpt.load(step=step)["step"]
                    assert found in (number, durable.get(step))
                    durable[step] = found
            faulty.proxy.heal()
            assert ckpt.steps() == sorted(durable)
            for step, value in durable.items():
                assert (ckpt.load(step=step)["w"] == value).all()
    stall.release()
    with checkpointer(faulty.url("run"), keep=None) as ckpt:
        ckpt.save(100, tree(100)).durable(60.0)
    check_whole(faulty.url("run"), [*sorted(durable), 100])
