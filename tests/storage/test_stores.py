"""What every Store promises, against a folder, memory, an S3 store, and one of yours.

HOLDFAST_TEST_STORE=az://container/folder pytest tests/storage/test_stores.py
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.coord import Agreement, SharedFolderAgreement
from holdfast.errors import MissingPathError, StorageError, UsageError
from holdfast.storage import LocalStore, Store, StoreOptions, is_url, opened
from holdfast.testing import AgreementConformance
from tests.storage.objects import FaultyStore

BLOCK = 8 << 20
YOURS = "HOLDFAST_TEST_STORE"


@pytest.fixture(params=["folder", "memory", "s3", "yours"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "yours":
        if YOURS not in os.environ:
            pytest.skip(f"{YOURS} names no store, as az://bucket/folder would")
        made = opened(f"{os.environ[YOURS]}/{uuid.uuid4().hex}")
    elif request.param == "folder":
        made = opened(tmp_path / "root")
    elif request.param == "memory":
        made = opened(f"memory://{tmp_path.name}-{id(tmp_path)}")
    else:
        faulty: FaultyStore = request.getfixturevalue("faulty")
        made = opened(faulty.url("run"), faulty.options())
    made.make_root()
    return made


def test_small_files(store: Store) -> None:
    assert store.names() == []
    assert not store.exists("a")
    store.make_folder("f")
    assert store.create("f", "a", data=b"one")
    assert not store.create("f", "a", data=b"two")
    assert store.read("f", "a", max_bytes=3) == b"one"
    assert store.size("f", "a") == 3
    assert store.size("f", "b") is None
    with pytest.raises(StorageError, match="3 bytes, more than the 2 allowed"):
        store.read("f", "a", max_bytes=2)
    with pytest.raises(MissingPathError):
        store.read("f", "b", max_bytes=2)
    assert store.replace("f", "a", data=b"three")
    assert store.read("f", "a", max_bytes=9) == b"three"
    assert store.names() == ["f"]
    assert store.names("f") == ["a"]
    assert store.having(["e", "f"], "a") == ["f"]
    assert list(store.walk()) == [("f", "a")]
    assert store.below("f").read("a", max_bytes=9) == b"three"
    assert store.is_place()
    assert (store.age_s("f", "a") or 0.0) < 60.0
    assert store.age_s("f", "b") is None
    store.create("f", "b", data=b"")
    store.remove_all("f", ["a", "b", "c"])
    assert store.names("f") == []
    store.remove_folder("f")
    assert "f" not in store.names()


def test_a_replacement_of_what_is_not_there_any_more_is_refused(store: Store) -> None:
    store.create("a", data=b"one")
    version = store.version("a")
    if store.has_locks:
        assert version is None  # writers of a folder keep each other out by locks
        return
    assert store.replace("a", data=b"two", expected=version)
    assert not store.replace("a", data=b"three", expected=version)
    assert store.read("a", max_bytes=9) == b"two"
    assert store.remove("a")
    assert not store.replace("a", data=b"four", expected=version)
    assert not store.exists("a")


def test_only_one_of_many_creators_wins(store: Store) -> None:
    won: list[int] = []
    start = threading.Barrier(8)

    def run(number: int) -> None:
        start.wait(30.0)
        if store.create("x", data=b"the same of all"):
            won.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(won) == 1


def _memory(size: int) -> memoryview:
    """Bytes in memory that begins at a page, as direct writes to a disk need it."""
    pattern = bytes(i * 7 % 251 for i in range(4096))
    whole = memoryview(mmap.mmap(-1, max(size, 1)))
    for begin in range(0, size, 4096):
        whole[begin : min(begin + 4096, size)] = pattern[: min(4096, size - begin)]
    return whole[:size]


@pytest.mark.parametrize("size", [0, 1, 5000, BLOCK + 1])
def test_parts(size: int, store: Store) -> None:
    data = _memory(size)
    writer = store.write_part("part", size=size)
    pieces = range(0, size, BLOCK)
    for begin in reversed(pieces):  # threads hand blocks in as they come
        writer.write(data[begin : begin + BLOCK], begin)
    writer.sync()
    writer.close()
    reader = store.open_part("part", direct=False)
    assert reader.size == size
    assert reader.read(1, 10) == data[1:11]
    buffer = memoryview(bytearray(4096))
    assert reader.read_into(buffer, 0) == min(size, 4096)
    assert buffer[: min(size, 4096)] == data[:4096]
    reader.close()
    with pytest.raises(MissingPathError):
        store.open_part("none")


def test_a_part_that_is_given_up_is_not_there(store: Store) -> None:
    writer = store.write_part("part", size=2 * BLOCK)
    writer.write(_memory(BLOCK), 0)
    writer.close()
    if not store.has_locks:  # a file keeps its reserved space until it is cleaned
        assert not store.exists("part")
        assert store.uploads() == []


def test_holds(store: Store) -> None:
    first = store.hold("lock", exclusive=True, holder="me")
    assert first is not None
    assert store.is_written("lock")
    assert store.holder("lock") == "me"
    assert store.hold("lock", exclusive=True) is None
    first.close()
    assert not store.is_written("lock")
    second = store.hold("lock", exclusive=True)
    assert second is not None
    second.close(remove=True)
    assert not store.exists("lock")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/", "a\0b"])
def test_names_cannot_escape(name: str, tmp_path: Path) -> None:
    for place in (str(tmp_path), "memory://x"):
        with pytest.raises(UsageError, match="not a legal name"):
            opened(place).create(name, data=b"")


class TestAgreementThroughObjects(AgreementConformance):
    """Ranks without a coordinator agree through the store itself, by creating names."""

    world = 3

    def member(self, place: Path, rank: int, world: int) -> Agreement:
        store = opened(f"memory://{place}")
        store.make_root()
        return SharedFolderAgreement(store.below("agreement"), rank=rank, world=world)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("ftp://host/x", "no place that Holdfast knows"),
        ("file://host/x", "on another machine"),
        ("s3://", "cannot be opened"),
        ("az://c/x", "Account must be specified"),
    ],
)
def test_what_is_no_place(place: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(UsageError, match=message):
        opened(place)


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1:9000", "minio:9000", "http://", "http://127.0.0.1:9000/ x"]
)
def test_an_endpoint_that_is_no_address_is_refused_before_the_first_request(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=r"endpoint is .* no address"):
        opened("s3://bucket/run", StoreOptions(endpoint=address))
    with pytest.raises(UsageError, match=r"endpoint_url is .* no address"):
        opened("s3://bucket/run", StoreOptions(config={"endpoint_url": address}))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", address)
    with pytest.raises(UsageError, match=r"AWS_ENDPOINT_URL_S3 is .* no address"):
        opened("s3://bucket/run")
    opened("gs://bucket/run", StoreOptions(config={"skip_signature": "true"}))


def test_an_endpoint_that_obstore_would_pass_over_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9000")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9001")  # of other services: no contradiction
    opened("s3://bucket/run")
    opened("s3://bucket/run", StoreOptions(endpoint="http://127.0.0.1:9000"))
    with pytest.raises(UsageError, match="another endpoint was given too") as caught:
        opened("s3://bucket/run", StoreOptions(endpoint="http://127.0.0.1:9002"))
    assert "unset AWS_ENDPOINT_URL_S3" in str(caught.value.hint)


def test_without_obstore_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(UsageError, match="obstore is not installed") as caught:
        opened("s3://bucket/run")
    assert caught.value.hint == "pip install 'holdfast[objects]'"


def test_places(tmp_path: Path) -> None:
    found = opened(f"file://{tmp_path}/a%20b")
    assert isinstance(found, LocalStore)
    assert found.root == str(tmp_path / "a b")
    makers: list[Callable[[], Store]] = [
        lambda: opened("s3://bucket/run/", StoreOptions(config={"region": "eu-west-1"})),
        lambda: opened("gs://bucket/run", StoreOptions(config={"skip_signature": "true"})),
        lambda: opened("az://c/run", StoreOptions(config={"account_name": "a", "skip_signature": "true"})),
    ]
    assert [maker().root for maker in makers] == ["s3://bucket/run", "gs://bucket/run", "az://c/run"]
    assert is_url("s3://x")
    assert not is_url("file:///x")
    assert "secret" not in repr(StoreOptions(config={"secret_access_key": "secret"}))
