"""What a checked run notices where both ends share memory, and what flow control says: in one process."""

from __future__ import annotations

import ctypes
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from holdfast.arrays import Bytes1D, Move, copying
from holdfast.arrays.copying import Batch
from holdfast.errors import IntegrityError, TransferError
from holdfast.transfer import Endpoint, Shard, TransferPlan, movers, served
from holdfast.transfer.buffers import BufferSet
from holdfast.transfer.chunks import BLOCK, DIGEST_BYTES, Cuts, copy
from holdfast.transfer.legs import Leg
from holdfast.transfer.messages import Credit, Wrote
from holdfast.transfer.pulling import PeerLink
from holdfast.transfer.route import Stream, Stretch
from holdfast.transfer.serving import TargetLink
from tests.arrays.faulty import FaultyLibrary

ROWS, COLUMNS = 4, 2 * BLOCK // 8  # of 8 bytes: a row is two blocks
WHOLE = np.arange(ROWS * COLUMNS, dtype=np.float64).reshape(ROWS, COLUMNS)
TEMPLATES: dict[str, Any] = {
    "contiguous": np.zeros_like(WHOLE),
    "strided": Shard(np.zeros((ROWS, COLUMNS - 8)), WHOLE.shape, (0, 8)),
}
WANTED = {"contiguous": WHOLE, "strided": WHOLE[:, 8:]}

Scene = tuple[Endpoint, np.ndarray[Any, Any], Callable[[], TransferPlan]]


@pytest.fixture(params=TEMPLATES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> FaultyLibrary:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here: the package does without the copies in C")
    return FaultyLibrary(tmp_path_factory.mktemp("faulty"))


@pytest.fixture
def scene(kind: str) -> Iterator[Scene]:
    """A source, what it publishes, and what makes a plan of another target, over shared memory."""
    with Endpoint(transports=("memfd",)) as source:
        targets: list[Endpoint] = []
        array = WHOLE.copy()
        source.publish("w", {"w": array}, 1)

        def plan() -> TransferPlan:
            targets.append(Endpoint(transports=("memfd",), chunk_bytes=4 * BLOCK))
            return targets[-1].prepare(source.address, "w", into={"w": TEMPLATES[kind]})

        yield source, array, plan
        for target in targets:
            target.close()


@pytest.mark.parametrize("fresh", [False, True], ids=["digests known", "a new version"])
@pytest.mark.parametrize("at", [0, 3, -1])
@pytest.mark.parametrize("kind", ["contiguous"], indirect=True)
def test_a_copy_in_c_that_goes_wrong_is_noticed(
    scene: Scene, at: int, fresh: bool, faulty: FaultyLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, array, plan_of = scene
    plan = plan_of()
    faulty.fail_at(-1)
    monkeypatch.setattr(copying, "library", faulty.library)
    for _ in range(2):
        assert np.array_equal(plan.run().result(20).tree["w"], WHOLE)
    steps, left = divmod(faulty.made, 2)
    assert steps > 3, "the copies go through it"
    assert not left
    if fresh:
        source.publish("w", {"w": array}, 2)
    faulty.fail_at(at % steps)
    with pytest.raises(IntegrityError, match="arrived damaged; it holds w"):
        plan.run().result(20)
    assert plan.current is not None
    assert np.array_equal(plan.current[1]["w"], WHOLE), "what was in service stays"
    faulty.fail_at(-1)
    assert np.array_equal(plan.run().result(20).tree["w"], WHOLE)


@pytest.mark.parametrize("fresh", [False, True], ids=["digests known", "a new version"])
@pytest.mark.parametrize("at", [0, 3, -1])
def test_a_copy_that_goes_wrong_is_noticed(
    scene: Scene, kind: str, at: int, fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, array, plan_of = scene
    plan = plan_of()
    for _ in range(2):  # of two buffers, both are known to the target afterwards
        assert np.array_equal(plan.run().result(20).tree["w"], WANTED[kind])
    if fresh:
        source.publish("w", {"w": array}, 2)
    calls = 0
    total = 2 * ROWS if kind == "contiguous" else 2  # blocks; or chunks, for the last is no whole one

    def damaged(last: Callable[[], Bytes1D]) -> None:
        nonlocal calls
        if calls == at % total:
            last()[-1] ^= 1
        calls += 1

    def damaging(move: Move, source: Bytes1D, target: Bytes1D) -> None:
        copy(move, source, target)
        damaged(lambda: target[: move.target + move.run])

    copy_group = Batch.copy

    def damaging_group(batch: Batch, begin: int, end: int) -> None:
        copy_group(batch, begin, end)
        offsets, _, sizes = (int(column[end - 1]) for column in batch.columns)
        memory = (ctypes.c_uint8 * sizes).from_address(batch.target + offsets)
        damaged(lambda: np.frombuffer(memoryview(memory), np.uint8))

    monkeypatch.setattr(served, "copy", damaging)
    monkeypatch.setattr(Batch, "copy", damaging_group)
    monkeypatch.setattr(Batch, "copy_hashed", lambda *_, **__: None)  # as without the library
    with pytest.raises(IntegrityError, match="arrived damaged; it holds w"):
        plan.run().result(20)
    assert calls > at % total
    assert plan.current is not None
    assert np.array_equal(plan.current[1]["w"], WANTED[kind]), "what was in service stays"
    monkeypatch.undo()
    assert np.array_equal(plan.run().result(20).tree["w"], WANTED[kind])


def test_a_source_that_writes_elsewhere_is_noticed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads back what it wrote, and finds it right: only the target can know."""

    def other(fd: int, nbytes: int) -> Bytes1D:
        os.close(fd)
        return np.zeros(nbytes, np.uint8)

    monkeypatch.setattr(served, "adopted", other)
    with pytest.raises(IntegrityError, match="arrived damaged; it holds w"):
        scene[2]().run().result(20)


@pytest.mark.parametrize("kind", ["contiguous"], indirect=True)
def test_the_target_hashes_the_first_run_into_a_buffer(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    add = movers._Proof.add

    def counting(proof: movers._Proof, chunk: int, expected: bytes) -> None:
        hashed.append(chunk)
        add(proof, chunk, expected)

    monkeypatch.setattr(movers._Proof, "add", counting)
    plan = scene[2]()
    plan.run(checked=False).result(20)
    assert not hashed, "who asks for no check gets none"
    counts = []
    for _ in range(4):
        plan.run().result(20)
        counts.append(len(hashed))
    assert counts == [2, 4, 4, 4], "two chunks; two buffers, in turns"


def test_a_chunk_that_comes_twice_fails_the_run(scene: Scene, kind: str) -> None:
    plan = scene[2]()
    tie = plan.ties[0]
    buffers = BufferSet(0, tie.route.nbytes)
    buffers.close()
    leg = Leg(1, tie.route, buffers, threading.Event(), checked=True)
    with leg.writing((0,)) as first:
        assert first
    with leg.writing((0,)) as again:
        assert not again
    assert isinstance(leg.error, TransferError)
    assert "chunk 0 was not asked for, or came before" in leg.error.message
    assert not leg.complete
    assert leg.close(), "nobody is inside"


def test_an_array_that_changes_between_two_readers_is_noticed(scene: Scene, kind: str) -> None:
    source, array, plan = scene
    plan().run().result(20)
    array[ROWS // 2, COLUMNS // 2] += 1
    second = plan()
    with pytest.raises(IntegrityError, match="while it was published"):
        second.run().result(20)
    source.publish("w", {"w": array}, 2)
    assert second.run().result(20).tree["w"].sum() == WANTED[kind].sum() + 1


@pytest.mark.parametrize("kind", ["contiguous"], indirect=True)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda one: Wrote(one.run, one.chunk, one.count),
        lambda one: Wrote(one.run, one.chunk, one.count, one.digest),
        lambda one: Wrote(one.run, one.chunk, one.count, one.digest, one.digest[:-1] + b"?"),
        lambda one: Wrote(one.run, one.chunk, one.count, b"", b""),
    ],
    ids=["no digest", "not read back", "read back wrong", "empty"],
)
def test_nothing_read_back_is_no_proof(
    scene: Scene,
    spoil: Callable[[Wrote], Wrote],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = scene[2]()
    say = TargetLink.say

    def spoiling(link: TargetLink, message: object) -> None:
        say(link, spoil(message) if isinstance(message, Wrote) else message)

    monkeypatch.setattr(TargetLink, "say", spoiling)
    with pytest.raises(IntegrityError, match="arrived damaged"):
        plan.run().result(20)
    assert plan.current is None
    assert "failed" not in caplog.text, "the link is not to blame"
    assert plan.run(checked=False).result(20).version == 1, "who asks for no check gets none"


def test_of_several_chunks_in_a_message_the_damaged_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Wrote] = []
    say = TargetLink.say
    damaged = -1

    def spoiling(link: TargetLink, message: object, *rest: Any) -> None:
        if isinstance(message, Wrote):
            said.append(message)
            at = (damaged - message.chunk) * DIGEST_BYTES
            if 0 <= at < len(message.found):
                found = bytearray(message.found)
                found[at] ^= 1
                message = Wrote(message.run, message.chunk, message.count, message.digest, bytes(found))
        say(link, message, *rest)

    monkeypatch.setattr(TargetLink, "say", spoiling)
    array = np.arange(32 * BLOCK // 8, dtype=np.float64)
    with (
        Endpoint(transports=("memfd",)) as source,
        Endpoint(transports=("memfd",), chunk_bytes=BLOCK) as target,
    ):
        source.publish("w", {"w": array}, 1)
        plan = target.prepare(source.address, "w")
        for _ in range(3):  # hashed by the target as well, and not
            said.clear()
            assert np.array_equal(plan.run().result(20).tree["w"], array)
            assert sorted(chunk for one in said for chunk in range(one.chunk, one.chunk + one.count)) == [
                *range(32)
            ]
            assert max(one.count for one in said) > 2 > min(one.count for one in said), "fewer to the end"
        for damaged in (0, 1, 6, 31):
            with pytest.raises(IntegrityError, match=f"chunk {damaged} of run .* arrived damaged"):
                plan.run().result(20)
        damaged = -1
        assert np.array_equal(plan.run().result(20).tree["w"], array)


@pytest.mark.parametrize("count", [-1, 0, 2, 1 << 40])
def test_a_message_that_counts_what_it_does_not_have_is_no_proof(count: int) -> None:
    assert movers._damaged(Wrote(1, 7, count, bytes(16), bytes(16))) == 7
    assert movers._damaged(Wrote(1, 7, count)) == 7


def test_pieces_are_hashed_alike_with_scratch_and_without() -> None:
    memory = np.random.default_rng(0).integers(0, 255, 1 << 20, dtype=np.uint8)
    starts = [(7, 100), (200_000, 300_000), (600, 10), (610, 5), (700_000, 20_000)]
    stretches, at = [], 0
    for start, size in starts:
        stretches.append(Stretch(0, Move(at, start, size)))
        at += size
    stretches.append(Stretch(0, Move(at, 800_000, 64, ((50, 64, 1000),))))
    stream = Stream(stretches, 1 << 18)
    scratch = np.empty(1 << 18, np.uint8)
    for chunk in range(stream.num_chunks):
        through, direct = Cuts(stream)[chunk], Cuts(stream, small=0)[chunk]
        assert through.digest([memory], scratch) == direct.digest([memory], scratch)
    assert Cuts(stream, small=0)[0].scratch_bytes == 0


def test_credit_is_given_in_a_few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one wakes the source: a chunk is not worth that."""
    given: list[int] = []
    say = PeerLink.say

    def counting(link: PeerLink, message: object, fds: tuple[int, ...] = ()) -> None:
        if isinstance(message, Credit):
            given.append(message.nbytes)
        say(link, message, fds)

    monkeypatch.setattr(PeerLink, "say", counting)
    window, chunk, size = 1 << 20, 1 << 16, 8 << 20
    with Endpoint(transports=("tcp",)) as source:
        source.publish("w", {"w": np.zeros(size, np.uint8)}, 1)
        with Endpoint(transports=("tcp",), window_bytes=window, chunk_bytes=chunk) as target:
            target.prepare(source.address, "w").run().result(20)
    assert size - window // 4 < sum(given) <= size
    assert all(window // 4 <= nbytes < window // 2 for nbytes in given), given
