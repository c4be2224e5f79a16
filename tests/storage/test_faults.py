"""An object store in trouble: what is tried again, what is not, and how doubtful answers are settled."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from holdfast.errors import AccessError, MissingPathError, StorageError, UnfitStoreError
from holdfast.storage import Store, opened
from tests.storage.objects import (
    Cut,
    Exchange,
    Fault,
    FaultyStore,
    Stall,
    reset,
    status,
    truncated,
    unconditional,
)

BLOCK = 8 << 20


@pytest.fixture
def store(faulty: FaultyStore) -> Store:
    return opened(faulty.url("run"), faulty.options(retry_s=20.0))


PASSING = {
    "500": status(500),
    "503 slow down": status(503, "SlowDown"),
    "reset": reset(),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING.keys())
def test_passing_trouble_is_not_noticed(faulty: FaultyStore, store: Store, fault: Fault) -> None:
    for method in ("PUT", "GET", "HEAD", "POST"):
        faulty.fail(method, "", fault, times=2)
    assert store.create("a", data=b"one")
    assert store.read("a", max_bytes=9) == b"one"
    assert store.exists("a")
    assert store.remove("a")
    assert store.names() == []


@pytest.mark.parametrize("fault", [status(500, after=True), reset(after=True)], ids=["500", "reset"])
def test_a_create_that_happened_and_was_answered_badly_counts(
    faulty: FaultyStore, store: Store, fault: Fault
) -> None:
    faulty.fail("PUT", "run/a$", fault)
    assert store.create("a", data=b"one")
    version = store.version("a")
    faulty.fail("PUT", "run/a$", fault)
    assert store.replace("a", data=b"two", expected=version)
    # Another's success is not taken for ours, even with the same bytes.
    faulty.fail("PUT", "run/a$", status(500))
    assert not store.create("a", data=b"two")


def test_a_create_that_timed_out_is_settled(faulty: FaultyStore) -> None:
    store = opened(faulty.url("run"), faulty.options(timeout_s=0.5))
    stall = Stall()
    faulty.fail("PUT", "run/a$", stall)
    assert store.create("a", data=b"one")
    assert stall.reached.is_set()
    assert faulty.proxy.count("PUT", "run/a$") >= 2
    stall.release()


@pytest.mark.parametrize(
    "fault", [truncated, reset(body=True), status(500)], ids=["truncated", "reset in the body", "500"]
)
def test_bytes_that_do_not_all_come_are_asked_for_again(
    faulty: FaultyStore, store: Store, fault: Fault
) -> None:
    data = bytes(range(256)) * 40
    store.create("a", data=data)
    reader = store.open_part("a")
    faulty.fail("GET", "run/a$", fault, times=2)
    buffer = memoryview(bytearray(8192))
    assert reader.read_into(buffer, 0) == 8192
    assert buffer == data[:8192]
    if fault is not truncated:  # of a whole object only its checksums tell, and those are the format's
        faulty.fail("GET", "run/a$", fault, times=2)
        assert store.read("a", max_bytes=1 << 20) == data


@pytest.mark.parametrize("answered", [False, True], ids=["before the answer", "amid the body"])
def test_a_range_that_stalls_is_asked_for_again(faulty: FaultyStore, answered: bool) -> None:
    store = opened(faulty.url("run"), faulty.options(timeout_s=0.5, retry_s=20.0))
    data = bytes(range(256)) * 40
    store.create("a", data=data)
    reader = store.open_part("a")
    stall = Stall()

    def fault(exchange: Exchange) -> None:
        if answered:
            code, headers, body = exchange.passed_on()
            exchange.answer(code, headers, body, upto=len(body) // 2)
        stall(exchange)

    faulty.fail("GET", "run/a$", fault)
    buffer = memoryview(bytearray(4096))
    started = time.monotonic()
    assert reader.read_into(buffer, 1024) == 4096
    assert time.monotonic() - started >= 0.4, "it was not the timeout that ended the wait"
    assert buffer == data[1024:5120]
    assert stall.reached.is_set()
    assert faulty.proxy.count("GET", "run/a$") >= 2
    stall.release()
    reader.close()


def test_who_reads_on_has_the_next_ranges_asked_for(faulty: FaultyStore, store: Store) -> None:
    data = bytes(range(256)) * 32
    store.create("a", data=data)
    reader = store.open_part("a")
    buffer = memoryview(bytearray(1024))
    for begin in range(0, len(data), 1024):
        assert reader.read_into(buffer, begin) == 1024
        assert buffer == data[begin : begin + 1024]
        if begin == 1024:  # the second right behind the first: the stretch goes on by itself
            ends = time.monotonic() + 30.0
            while faulty.proxy.count("GET", "run/a$") < 6:
                assert time.monotonic() < ends
                threading.Event().wait(0.01)
    assert faulty.proxy.count("GET", "run/a$") == 8  # each range once
    assert reader.read_into(buffer, 512) == 1024
    assert buffer == data[512:1536]
    reader.close()


def test_a_store_that_stays_in_trouble_is_given_up_in_time(faulty: FaultyStore) -> None:
    store = opened(faulty.url("run"), faulty.options(retry_s=1.0))
    faulty.fail("GET", "", status(503, "SlowDown"), times=10_000)
    started = time.monotonic()
    with pytest.raises(StorageError, match="SlowDown: told to") as caught:
        store.names()
    assert time.monotonic() - started < 10.0
    assert "in trouble" in (caught.value.hint or "")


def test_a_silent_store_is_given_up_in_time(faulty: FaultyStore) -> None:
    store = opened(faulty.url("run"), faulty.options(timeout_s=0.5, retry_s=1.0))
    stall = Stall()
    faulty.fail("GET", "", stall, times=100)
    started = time.monotonic()
    with pytest.raises(StorageError, match="cannot list"):
        store.names()
    assert time.monotonic() - started < 10.0
    stall.release()


def test_wrong_credentials_are_not_tried_twice(faulty: FaultyStore, store: Store) -> None:
    faulty.fail("GET", "", status(403, "InvalidAccessKeyId"), times=10)
    with pytest.raises(AccessError, match="InvalidAccessKeyId") as caught:
        store.names()
    assert "AWS_ACCESS_KEY_ID" in (caught.value.hint or "")
    assert len(faulty.proxy.log) == 1
    faulty.fail("PUT", "", status(403, "AccessDenied"), times=10)
    with pytest.raises(AccessError):
        store.make_root()


def test_a_missing_bucket(faulty: FaultyStore) -> None:
    store = opened("s3://no-such-bucket/run", faulty.options())
    for look in (store.is_place, store.make_root, lambda: store.create("a", data=b"")):
        with pytest.raises(MissingPathError, match="NoSuchBucket") as caught:
            look()
        assert "create the bucket" in (caught.value.hint or "")


def test_a_store_that_ignores_conditions_is_refused(faulty: FaultyStore) -> None:
    faulty.fail("PUT", "", unconditional, times=10_000)
    with pytest.raises(UnfitStoreError, match="create it only if absent"):
        opened(faulty.url("run"), faulty.options()).make_root()
    faulty.proxy.heal()
    faulty.fail("PUT", "probe-", unconditional, times=10_000, skip=2)
    with pytest.raises(UnfitStoreError, match="another version lies there"):
        opened(faulty.url("run"), faulty.options()).make_root()
    faulty.proxy.heal()
    store = opened(faulty.url("run"), faulty.options())
    store.make_root()
    assert store.names() == []  # no probe is left


@pytest.mark.parametrize(
    "what", ["500s", *(pytest.param(what, marks=pytest.mark.full) for what in ("resets", "stalls", "cuts"))]
)
def test_an_upload_goes_on_through_trouble(faulty: FaultyStore, store: Store, what: str) -> None:
    stall = Stall()
    faults: dict[str, Fault] = {"500s": status(500), "resets": reset(), "stalls": stall, "cuts": Cut()}
    fault = faults[what]
    faulty.fail("POST", "uploads", fault)
    faulty.fail("PUT", "partNumber=1", fault)
    faulty.fail("POST", "uploadId", fault)
    data = bytes(BLOCK) + b"end"
    writer = store.write_part("part", size=len(data))
    writer.write(memoryview(data)[:BLOCK], 0)
    writer.write(memoryview(data)[BLOCK:], BLOCK)
    writer.sync()
    writer.close()
    stall.release()
    assert store.size("part") == len(data)


def test_an_upload_that_fails_leaves_nothing(faulty: FaultyStore) -> None:
    store = opened(faulty.url("run"), faulty.options(retry_s=0.5))
    faulty.fail("PUT", "partNumber=2", status(500), times=100)
    writer = store.write_part("part", size=BLOCK + 1)
    writer.write(memoryview(bytes(BLOCK)), 0)
    writer.write(memoryview(b"x"), BLOCK)
    with pytest.raises(StorageError, match="cannot write"):
        writer.sync()
    with pytest.raises(StorageError, match="cannot write"):
        writer.write(memoryview(b"x"), BLOCK)
    writer.close()
    assert not store.exists("part")
    assert store.uploads() == []


def test_unfinished_uploads_are_found_and_given_up(faulty: FaultyStore, store: Store) -> None:
    stall = Stall()
    faulty.fail("PUT", "partNumber=1", stall)
    writer = store.write_part("f", "part", size=BLOCK + 1)
    writer.write(memoryview(bytes(BLOCK)), 0)
    assert stall.reached.wait(30.0)
    (found,) = store.uploads()
    assert found.names == ("f", "part")
    assert store.below("f").uploads()[0].names == ("part",)
    assert opened(faulty.url("ru"), faulty.options()).uploads() == []
    store.drop_upload(found)
    assert store.uploads() == []
    stall.release()
    writer.close()
    assert not store.exists("f", "part")


def test_a_holder_that_gives_no_sign_of_life_loses_its_hold(faulty: FaultyStore) -> None:
    """The lease of a dead process on another machine is taken over; a live one's is not."""
    store = opened(faulty.url("run"), faulty.options(hold_s=2.0))
    other = b'{"holder": "them", "machine": "elsewhere", "pid": 1, "started": 1, "life": "x", "beat": 0}'
    store.create("lock", data=other)
    assert store.is_written("lock")
    assert store.hold("lock", exclusive=True) is None
    ends = time.monotonic() + 30.0
    while (hold := store.hold("lock", exclusive=True, holder="me")) is None:
        assert time.monotonic() < ends
        threading.Event().wait(0.1)
    beaten = store.version("lock")
    while store.version("lock") == beaten:
        assert time.monotonic() < ends
        threading.Event().wait(0.05)
    assert store.holder("lock") == "me"
    hold.close()
    assert not store.exists("lock")


def test_a_dead_holder_on_this_machine_is_known_at_once(store: Store) -> None:
    from holdfast.storage.beats import _machine

    record = f'{{"holder": "", "machine": "{_machine()}", "pid": 999999999, "started": 1, "life": "x"}}'
    store.create("lock", data=record.encode())
    assert not store.is_written("lock")
    hold = store.hold("lock", exclusive=True)
    assert hold is not None
    hold.close()


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"])
def test_plain_http_is_taken_from_each_variable_and_named_when_nobody_is_there(
    name: str, faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv(name, faulty.proxy.address)
    assert opened(faulty.url("run"), faulty.options()).names() == []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"  # bound, not listening: refused
        monkeypatch.setenv(name, address)
        with pytest.raises(StorageError, match="error sending request") as caught:
            opened(faulty.url("run"), faulty.options(retry_s=0.2)).names()
    assert f"{name} = {address}" in str(caught.value.hint)
