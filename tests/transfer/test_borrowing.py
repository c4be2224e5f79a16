"""Memory that a source lends: read by the target itself, and worth nothing unless it was lent to the end."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np
import pytest
from msgspec.structs import replace

from holdfast.arrays import Bytes1D, Move, pages
from holdfast.errors import PeerLostError, StalledError, TransferCancelled, TransferError, VersionGoneError
from holdfast.transfer import Endpoint, Publication, PublishedTree, Shard, borrowing, buffers, publication
from holdfast.transfer.borrowing import Intake
from holdfast.transfer.messages import Confirmed, Loan, Prepared, Started
from holdfast.transfer.patience import Patience
from holdfast.transfer.publication import Edition
from holdfast.transfer.served import ServedRun
from holdfast.transfer.serving import TargetLink
from tests.transfer.pools import Pool
from tests.transfer.test_endpoint import until

SOON_S = 10.0
NAME = "w"


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    """numpy arrays land here."""
    return Pool(monkeypatch)


Pair = tuple[Endpoint, Endpoint]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with (
        Endpoint(transports=("memfd", "tcp"), chunk_bytes=1 << 16) as source,
        Endpoint(transports=("memfd", "tcp"), chunk_bytes=1 << 16) as target,
    ):
        yield source, target


@final
class Shared:
    """A memfd with arrays in it, one after the other."""

    def __init__(self, arrays: dict[str, Any], *, sealed: bool = True) -> None:
        self.arrays = arrays
        size = max(4096, sum(-(-one.nbytes // 64) * 64 for one in arrays.values()))
        self.fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        if sealed:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, pages.SEALS)
        self.memory: Bytes1D = np.frombuffer(mmap.mmap(self.fd, size), np.uint8)
        self.tree = PublishedTree((self.fd, self.memory))
        at = 0
        for name, array in arrays.items():
            data = self.memory[at : at + array.nbytes]
            data[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            box = tuple((0, dim) for dim in array.shape)
            self.tree.add_array(name, str(array.dtype), array.shape, [(box, data)])
            at += -(-array.nbytes // 64) * 64
        self.tree.add_scalar("step", "int", "7")

    def publish(self, endpoint: Endpoint, version: int = 1) -> Publication:
        return endpoint.publish_slices(NAME, self.tree, version)


def some(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "a": rng.standard_normal((500, 700)).astype(np.float32),
        "b": rng.integers(0, 255, (3, 5, 7), np.uint8),
        "empty": np.empty((0, 4), np.int16),
        "z": rng.standard_normal(()).astype(np.float64),
    }


def equal(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return all(
        found[name].dtype == array.dtype and np.array_equal(found[name], array)
        for name, array in wanted.items()
    )


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_is_lent_is_copied_by_the_target(pair: Pair, pool: Pool) -> None:
    source, target = pair
    shared = Shared(some())
    with shared.publish(source) as published:
        plan = target.prepare(source.address, NAME)
        result = plan.run(deadline_s=SOON_S).result(SOON_S)
        assert equal(result.tree, shared.arrays)
        assert result.tree["step"] == 7
        assert list(result.transports.values()) == ["lent"]
        assert pool.placed == len(shared.arrays)
        assert pool.closed
        assert not plan.buffers.made  # no memory for all of it
        assert until(lambda: list(published.targets().values()) == ["committed"] and not published.readers)


def test_a_new_version_is_lent_to_the_same_plan(pair: Pair, pool: Pool) -> None:
    source, target = pair
    first, second = Shared(some(1)), Shared(some(2))
    first.publish(source, 1)
    plan = target.prepare(source.address, NAME)
    one = plan.run(deadline_s=SOON_S).result(SOON_S)
    second.publish(source, 2)
    two = plan.run(deadline_s=SOON_S).result(SOON_S)
    assert (one.version, two.version) == (1, 2)
    assert equal(one.tree, first.arrays)
    assert equal(two.tree, second.arrays)


@pytest.mark.parametrize("span", [64, 1000, 1 << 20])
def test_slices_of_several_peers_are_put_together(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, span: int
) -> None:
    monkeypatch.setattr(borrowing, "_SPAN", span)
    whole = np.arange(60 * 40, dtype=np.int32).reshape(60, 40)
    ways = ("memfd", "tcp")
    with Endpoint(transports=ways) as a, Endpoint(transports=ways) as b, Endpoint(transports=ways) as target:
        for peer, rows in ((a, (0, 25)), (b, (25, 60))):
            shared = Shared({"x": whole[slice(*rows)]})
            data = shared.memory[: whole[slice(*rows)].nbytes]
            tree = PublishedTree((shared.fd, shared.memory))
            tree.add_array("x", "int32", whole.shape, [((rows, (0, 40)), data)])
            peer.publish_slices(NAME, tree, 1)
        for box in (((0, 60), (0, 40)), ((10, 50), (3, 31)), ((30, 40), (0, 40))):
            want = whole[box[0][0] : box[0][1], box[1][0] : box[1][1]]
            into = {"x": Shard(np.empty_like(want), whole.shape, [lo for lo, _ in box])}
            plan = target.prepare([a.address, b.address], NAME, into=into)
            plan.borrows = True  # slices are numpy's own: nothing of them lands on a device
            found = plan.run(deadline_s=SOON_S).result(SOON_S)
            assert set(found.transports.values()) == {"lent"}
            assert np.array_equal(found.tree["x"], want)


def test_a_cast_array_has_memory_of_its_own(pair: Pair, pool: Pool) -> None:
    source, target = pair
    shared = Shared({"a": np.arange(1000, dtype=np.float32), "b": np.arange(10, dtype=np.int32)})
    shared.publish(source)
    into = {"a": np.empty(1000, np.float64), "b": np.empty(10, np.int32)}
    found = target.prepare(source.address, NAME, into=into, strict=False, cast=True).run().result(SOON_S)
    assert found.tree["a"].dtype == np.float64
    assert np.array_equal(found.tree["a"], shared.arrays["a"])
    assert np.array_equal(found.tree["b"], shared.arrays["b"])
    assert pool.taken == 1


def test_private_memory_is_sent_as_ever_and_not_asked_for_again(pair: Pair, pool: Pool) -> None:
    source, target = pair
    source.publish(NAME, some(), 1)
    plan = target.prepare(source.address, NAME)
    assert plan.borrows
    found = plan.run(deadline_s=SOON_S).result(SOON_S)
    assert list(found.transports.values()) == ["memfd"]
    assert equal(found.tree, some())
    assert not plan.borrows


def test_arrays_that_stay_in_host_memory_borrow_nothing(pair: Pair) -> None:
    source, target = pair
    shared = Shared(some())
    shared.publish(source)
    found = target.prepare(source.address, NAME).run(deadline_s=SOON_S).result(SOON_S)
    assert list(found.transports.values()) == ["memfd"]
    assert equal(found.tree, shared.arrays)


Meanwhile = Callable[[], None]


def during(monkeypatch: pytest.MonkeyPatch, act: Meanwhile) -> None:
    """Have something happen when all is copied and the peers were not asked yet."""
    run = Intake.run

    def late(self: Intake, *args: Any) -> None:
        run(self, *args)
        act()

    monkeypatch.setattr(Intake, "run", late)


def test_a_version_that_is_revoked_while_it_is_read_is_no_success(
    pair: Pair, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair
    kept, lost = Shared(some(1)), Shared(some(2))
    kept.publish(source, 1)
    plan = target.prepare(source.address, NAME)
    plan.run(deadline_s=SOON_S).result(SOON_S)
    second = lost.publish(source, 2)

    def revoked() -> None:
        second.revoke("another save begins in this memory")
        lost.memory[:] = 0

    during(monkeypatch, revoked)
    with pytest.raises(VersionGoneError, match="revoked while it was read"):
        plan.run(2, deadline_s=SOON_S).result(SOON_S)
    assert plan.current is not None
    assert plan.current[0] == 1
    assert equal(plan.current[1], kept.arrays)
    assert pool.closed == 2


def test_a_revocation_does_not_wait_for_who_reads_what_was_lent(
    pair: Pair, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair
    publication = Shared(some()).publish(source)
    reading, revoked = threading.Event(), threading.Event()

    def held() -> None:
        reading.set()
        assert revoked.wait(SOON_S)

    during(monkeypatch, held)
    transfer = target.prepare(source.address, NAME).run(1, deadline_s=SOON_S)
    assert reading.wait(SOON_S)
    publication.revoke("now")
    assert publication.wait_released(SOON_S)
    revoked.set()
    with pytest.raises(VersionGoneError):
        transfer.result(SOON_S)


def test_a_source_that_dies_before_it_confirms_is_no_success(
    pair: Pair, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair
    Shared(some()).publish(source)
    during(monkeypatch, source.close)
    plan = target.prepare(source.address, NAME)
    with pytest.raises(PeerLostError):
        plan.run(deadline_s=SOON_S).result(SOON_S)
    assert plan.current is None
    assert pool.closed


def test_a_framework_that_fails_ends_the_run_and_gives_all_back(pair: Pair, pool: Pool) -> None:
    source, target = pair
    published = Shared(some()).publish(source)
    pool.fails = RuntimeError("the device is out of memory")
    with pytest.raises(TransferError, match="out of memory"):
        target.prepare(source.address, NAME).run(deadline_s=SOON_S).result(SOON_S)
    assert pool.closed == 1
    assert until(lambda: list(published.targets().values()) == ["aborted"] and not published.readers)


@pytest.mark.parametrize(
    "error", [IndexError("list index out of range"), MemoryError()], ids=["index", "memory"]
)
def test_a_copy_that_fails_fails_the_run(
    pair: Pair, pool: Pool, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    source, target = pair
    Shared(some()).publish(source)
    plan = target.prepare(source.address, NAME)

    def failing(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Move, "apply", failing)
    with pytest.raises(TransferError, match="the transfer failed"):
        plan.run(deadline_s=SOON_S).result(SOON_S)
    assert plan.current is None
    assert pool.closed


def test_a_deadline_and_a_cancel_end_a_run_that_copies(
    pair: Pair, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair
    Shared(some()).publish(source)
    plan = target.prepare(source.address, NAME)
    copying, go = threading.Event(), threading.Event()
    copy = Intake._copy

    def slow(self: Intake, *args: Any) -> None:
        copying.set()
        assert go.wait(SOON_S)
        copy(self, *args)

    monkeypatch.setattr(Intake, "_copy", slow)
    with monkeypatch.context() as patch:
        patch.setattr(Patience, "expired", lambda _: copying.is_set())
        late = plan.run(deadline_s=SOON_S)
        assert copying.wait(SOON_S)
        # It ends when its threads are out of the memory, not before.
        threading.Timer(0.5, go.set).start()
        with pytest.raises(StalledError, match="copied within deadline_s=10"):
            late.result(SOON_S)
    copying.clear()
    go.clear()
    cancelled = plan.run(deadline_s=SOON_S)
    assert copying.wait(SOON_S)
    cancelled.cancel()
    go.set()
    with pytest.raises(TransferCancelled):
        cancelled.result(SOON_S)
    assert pool.closed == 2


def test_what_is_lent_cannot_be_written() -> None:
    shared = Shared(some())
    fd = buffers.lendable(shared.fd)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 4096)
    lent = buffers.borrowed(fd, shared.memory.size)
    assert np.array_equal(lent, shared.memory)
    assert not lent.flags.writeable


def test_memory_that_could_be_made_smaller_is_neither_lent_nor_read(
    pair: Pair, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair
    shared = Shared(some(), sealed=False)
    shared.publish(source, 1)
    plan = target.prepare(source.address, NAME)
    sent = plan.run(deadline_s=SOON_S).result(SOON_S)
    assert list(sent.transports.values()) == ["memfd"]
    monkeypatch.setattr(publication, "is_sealed", lambda _fd: True)
    shared.publish(source, 2)
    plan.borrows = True
    with pytest.raises(TransferError, match="must be sealed"):
        plan.run(2, deadline_s=SOON_S).result(SOON_S)


def test_a_source_without_descriptors_sends(
    pair: Pair, pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(_fd: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    source, target = pair
    monkeypatch.setattr(publication, "lendable", none_left)
    shared = Shared(some())
    shared.publish(source)
    found = target.prepare(source.address, NAME).run(deadline_s=SOON_S).result(SOON_S)
    assert list(found.transports.values()) == ["memfd"]
    assert equal(found.tree, shared.arrays)
    assert "Too many open files" in caplog.text


def test_a_loan_is_sent_before_its_descriptor_can_end(
    pair: Pair, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that is revoked while it is lent: the descriptor's number would be anything by then."""
    source, target = pair
    published = Shared(some()).publish(source)
    say, await_out = TargetLink.say, ServedRun.await_out
    revoking: list[threading.Thread] = []
    waiting = threading.Event()

    def patient(self: ServedRun, _timeout_s: float) -> None:
        waiting.set()
        await_out(self, SOON_S)

    def late(self: TargetLink, message: object, fds: tuple[int, ...] = ()) -> None:
        if isinstance(message, Loan):
            revoking.append(threading.Thread(target=published.revoke, args=("now",)))
            revoking[0].start()
            assert waiting.wait(SOON_S)
            assert not published.wait_released(0), "it did not wait for the loan to be sent"
            os.fstat(fds[0])
        say(self, message, fds)

    monkeypatch.setattr(TargetLink, "say", late)
    monkeypatch.setattr(ServedRun, "await_out", patient)
    monkeypatch.setattr("holdfast.transfer.served._GRACE_S", 60.0)
    plan = target.prepare(source.address, NAME)
    with pytest.raises(VersionGoneError):
        plan.run(1, deadline_s=SOON_S).result(SOON_S)
    revoking[0].join(SOON_S)
    assert published.wait_released(SOON_S)
    assert plan.ties[0].open_link().lost == ""


def test_a_version_that_is_revoked_before_it_is_lent_is_refused_at_once(
    pair: Pair, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair
    published = Shared(some()).publish(source)
    read = Edition.read

    def late(self: Edition, *args: Any) -> Any:
        found = read(self, *args)
        published.revoke("now")
        return found

    monkeypatch.setattr(Edition, "read", late)
    with pytest.raises(VersionGoneError, match="was revoked"):
        target.prepare(source.address, NAME).run(1, deadline_s=SOON_S).result(SOON_S)


Change = Callable[[Loan], Any]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda loan: replace(loan, offsets=(loan.nbytes - 1, *loan.offsets[1:])), "lie within"),
        (lambda loan: replace(loan, offsets=(-64, *loan.offsets[1:])), "lie within"),
        (lambda loan: replace(loan, offsets=loan.offsets[1:]), "slices were to be lent"),
        (lambda loan: replace(loan, nbytes=-5), "was announced"),
        (lambda loan: replace(loan, nbytes=0), "was announced"),
        (lambda loan: replace(loan, nbytes=loan.nbytes * 100), "was announced"),
        (lambda loan: replace(loan, run=loan.run + 1), "for another run"),
        (lambda loan: Prepared(loan.seq), "it lent nothing"),
    ],
    ids=["end", "negative", "few", "less", "none", "huge", "other run", "no loan"],
)
def test_a_loan_that_makes_no_sense_is_refused(
    pair: Pair, pool: Pool, monkeypatch: pytest.MonkeyPatch, change: Change, says: str
) -> None:
    source, target = pair
    published = Shared(some()).publish(source)
    say = TargetLink.say

    def strange(self: TargetLink, message: object, fds: tuple[int, ...] = ()) -> None:
        say(self, change(message) if isinstance(message, Loan) else message, fds)

    plan = target.prepare(source.address, NAME)
    before = descriptors()
    monkeypatch.setattr(TargetLink, "say", strange)
    with pytest.raises(TransferError, match=says):
        plan.run(deadline_s=SOON_S).result(SOON_S)
    assert until(lambda: published.readers == 0)
    assert until(lambda: descriptors() <= before)


def test_another_answer_is_no_confirmation(pair: Pair, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = pair
    Shared(some()).publish(source)
    say = TargetLink.say

    def strange(self: TargetLink, message: object, fds: tuple[int, ...] = ()) -> None:
        say(self, Prepared(message.seq) if isinstance(message, Confirmed) else message, fds)

    monkeypatch.setattr(TargetLink, "say", strange)
    plan = target.prepare(source.address, NAME)
    with pytest.raises(TransferError, match="did not confirm"):
        plan.run(deadline_s=SOON_S).result(SOON_S)
    assert plan.current is None


def test_descriptors_that_nobody_asked_for_are_closed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = pair
    source.publish(NAME, some(), 1)
    say = TargetLink.say
    extra = os.open("/dev/null", os.O_RDONLY)

    def generous(self: TargetLink, message: object, fds: tuple[int, ...] = ()) -> None:
        say(self, message, (*fds, extra))

    target.prepare(source.address, NAME).close()
    before = descriptors()
    monkeypatch.setattr(TargetLink, "say", generous)
    for _ in range(5):
        target.prepare(source.address, NAME).close()
    assert until(lambda: descriptors() <= before)
    os.close(extra)


def test_a_source_that_knows_of_no_loans_sends(
    pair: Pair, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair
    shared = Shared(some())
    shared.publish(source)

    def older(self: ServedRun, edition: Edition) -> None:
        self._link.say(Started(self._asked.seq, self.number, edition.version, edition.manifest.scalars))

    monkeypatch.setattr(ServedRun, "_lend", older)
    found = target.prepare(source.address, NAME).run(deadline_s=SOON_S).result(SOON_S)
    assert list(found.transports.values()) == ["memfd"]
    assert equal(found.tree, shared.arrays)


def test_no_descriptor_is_left_behind(pair: Pair, pool: Pool) -> None:
    source, target = pair
    shared = Shared(some())
    shared.publish(source, 1)
    plan = target.prepare(source.address, NAME)
    plan.run(deadline_s=SOON_S).result(SOON_S)
    before = descriptors()
    for version in range(2, 12):
        publication = shared.publish(source, version)
        plan.run(deadline_s=SOON_S).result(SOON_S)
        publication.revoke("over")
        assert publication.wait_released(SOON_S)
    assert descriptors() <= before
