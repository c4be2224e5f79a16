"""Signs of life: what was lost on the way, who took over, and who may take what away."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest

from holdfast.errors import StorageError, UsageError
from holdfast.storage import StoreOptions, opened
from holdfast.storage.beats import Beats, Record, _BeatHold
from holdfast.storage.bucket import Bucket
from holdfast.storage.uploads import Credentials, Uploads
from tests.storage.objects import FaultyStore, status

KEY = "lock"


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(f"memory://{tmp_path.name}-{id(tmp_path)}", StoreOptions(hold_s=60.0))


def taken(beats: Beats) -> _BeatHold:
    hold = beats.take(KEY, exclusive=True, holder="me")
    assert isinstance(hold, _BeatHold)
    return hold


def put(bucket: Bucket, **changes: object) -> None:
    """Change the record that lies there, as another request does."""
    record = msgspec.json.decode(bucket.get(KEY, max_bytes=4096).data, type=Record)
    bucket.put(KEY, msgspec.json.encode(msgspec.structs.replace(record, **changes)))


def test_a_sign_whose_answer_was_lost_does_not_cost_the_hold(bucket: Bucket) -> None:
    hold = taken(Beats(bucket))
    put(bucket, beat=7)  # it arrived, and nobody was told
    hold.beat()
    hold.beat()
    found = msgspec.json.decode(bucket.get(KEY, max_bytes=4096).data, type=Record)
    assert found.beat == 2
    hold.close()
    assert bucket.head(KEY) is None


def test_a_hold_that_another_took_meanwhile_is_not_ours_to_remove(bucket: Bucket) -> None:
    hold = taken(Beats(bucket))
    lost = [hold.lost]
    put(bucket, life="another")
    hold.beat()
    assert [*lost, hold.lost] == [False, True]
    hold.close()
    assert bucket.head(KEY) is not None


def test_a_defect_does_not_silence_all_holds(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = Bucket(bucket.url, StoreOptions(hold_s=0.15))
    hold = taken(Beats(quick))
    plain, calls, third = _BeatHold.beat, [], threading.Event()

    def beat(self: _BeatHold) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("a defect")
        plain(self)
        if len(calls) >= 3:
            third.set()

    monkeypatch.setattr(_BeatHold, "beat", beat)
    seen = third.wait(30.0)
    hold.close()
    assert seen


def test_an_answer_that_is_no_listing(monkeypatch: pytest.MonkeyPatch, bucket: Bucket) -> None:
    page = (
        "<R><IsTruncated>true</IsTruncated><NextKeyMarker>k</NextKeyMarker>"
        "<Upload><Key>a</Key><UploadId>1</UploadId></Upload><Upload><Key>b</Key></Upload></R>"
    )
    monkeypatch.setattr("holdfast.storage.uploads._config", lambda bucket: {"bucket": "b"})
    uploads = Uploads(bucket, Credentials("id", "secret"))
    monkeypatch.setattr(Uploads, "_ask", lambda *_: page.encode())
    assert len(uploads.below("")) == 2  # a store that says the same again is not asked for ever
    monkeypatch.setattr(Uploads, "_ask", lambda *_: b"<html>busy")
    with pytest.raises(StorageError, match="no XML"):
        uploads.below("")


@pytest.mark.parametrize("place", ["/tmp/\udcff", "a\0b", ""])
def test_a_place_that_no_message_could_name(place: str) -> None:
    with pytest.raises(UsageError) as caught:
        opened(place)
    assert caught.value.hint


@pytest.mark.parametrize("prefix", ["über läufe/a b", "50%/x#1+y=&z", "a.b/~x", "deep/" * 40 + "x"])
def test_odd_prefixes(prefix: str, faulty: FaultyStore) -> None:
    store = opened(faulty.url(prefix), faulty.options())
    store.make_root()
    store.create("step-00000001", "a", data=b"one")
    assert store.names() == ["step-00000001"]
    assert list(store.walk()) == [("step-00000001", "a")]
    assert store.read("step-00000001", "a", max_bytes=9) == b"one"
    assert store.uploads() == []


def test_a_prefix_that_is_too_long_is_said_to_be(faulty: FaultyStore) -> None:
    faulty.fail("PUT", "", status(400, "KeyTooLongError"))
    with pytest.raises(StorageError, match="KeyTooLong") as caught:
        opened(faulty.url("x" * 500), faulty.options()).make_root()
    assert "shorter prefix" in (caught.value.hint or "")
