"""Real kills amid an export: nothing that loads is left, the next export clears the rest and is whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import FormatError, LeaseError, MissingPathError
from holdfast.storage import StoreOptions, opened
from tests.checkpoint.children import Child, Children
from tests.checkpoint.hub import exporter
from tests.checkpoint.hub.repositories import same
from tests.storage.objects import FaultyStore, Stall

pytestmark = pytest.mark.process

FILES = ["config.json", *(f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)),
         "model.safetensors.index.json"]  # fmt: skip


def started(children: Children, place: object, *arguments: str) -> Child:
    return children.python("-m", "tests.checkpoint.hub.exporter", place, *arguments)


def check_whole(place: str | Path) -> None:
    loaded, wanted = holdfast.load_hub(place), exporter.tree()
    assert loaded.keys() == wanted.keys()
    assert all(same(loaded[name], wanted[name]) for name in wanted)


def test_killed_amid_an_upload(children: Children, faulty: FaultyStore) -> None:
    url, stall = faulty.url("models/small"), Stall()
    store, beside = opened(url), opened(faulty.url("models"))
    beside.create("of-others", data=b"stays")
    faulty.fail("PUT", "partNumber=2", stall, skip=1, times=100)
    child = started(children, url)
    assert stall.reached.wait(60.0)
    child.kill()
    child.end()
    faulty.proxy.heal()
    stall.release()
    assert [name for name in store.names() if name in FILES] == FILES[:2]
    assert len(store.uploads()) == 1
    with pytest.raises(FormatError, match=r"model-00001-of-00003\.safetensors and no model"):
        holdfast.load_hub(url)
    exporter.save(url)
    assert sorted(store.walk()) == [(name,) for name in FILES]
    assert store.uploads() == []
    assert beside.exists("of-others")
    check_whole(url)


def test_a_live_export_to_a_store_is_not_disturbed(children: Children, faulty: FaultyStore) -> None:
    url, stall = faulty.url("small"), Stall()
    faulty.fail("PUT", "partNumber=2", stall, skip=1)
    child = started(children, url)
    assert stall.reached.wait(60.0)
    with pytest.raises(LeaseError, match="another export is writing to s3://"):
        exporter.save(url, options=StoreOptions(hold_s=3.0))
    stall.release()
    child.until("done")
    assert child.end() == 0, child.errors()
    assert sorted(opened(url).walk()) == [(name,) for name in FILES]
    assert opened(url).uploads() == []
    check_whole(url)


def test_killed_amid_a_folder(children: Children, tmp_path: Path) -> None:
    place = tmp_path / "models" / "small"
    child = started(children, place, "step")
    child.until("tensor")
    child.tell()
    child.until("tensor")  # two of three
    with pytest.raises(LeaseError, match="another export is writing to"):
        exporter.save(str(place))
    child.kill()
    child.end()
    (left,) = os.listdir(place.parent)
    assert left.startswith(".small.hub-")
    with pytest.raises(MissingPathError):
        holdfast.load_hub(place)
    with pytest.raises(FormatError, match="a part of a repository"):
        holdfast.load_hub(place.parent / left)
    exporter.save(str(place))
    assert os.listdir(place.parent) == ["small"]
    assert sorted(os.listdir(place)) == FILES
    check_whole(place)
