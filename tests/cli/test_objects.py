"""`holdfast ckpt` on an object store: the same commands, and errors that say what to do."""

from __future__ import annotations

import json

import pytest

from holdfast.cli import folder, terminal
from holdfast.storage import StoreOptions
from tests.checkpoint.test_objects import checkpointer, tree
from tests.cli.saved import holdfast
from tests.storage.objects import FaultyStore, corrupt, status


@pytest.fixture
def url(faulty: FaultyStore) -> str:
    place = faulty.url("runs/a")
    with checkpointer(place, keep=None) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, tree(step)).durable(60.0)
    return place


def test_the_commands_work_there(url: str, faulty: FaultyStore) -> None:
    listed = json.loads(holdfast("ckpt", "ls", url, "--json").stdout)
    assert listed["path"] == url
    assert [(row["step"], row["status"]) for row in listed["steps"]] == [
        (1, "committed"),
        (2, "committed"),
        (3, "committed"),
    ]
    shown = holdfast("ckpt", "show", f"{url}/step-00000002")
    assert shown.stdout.startswith("step 2\n")
    verified = holdfast("ckpt", "verify", url, "--all")
    assert verified.exit_code == 0
    assert verified.stdout.count(": ok (") == 3
    differing = holdfast("ckpt", "diff", f"{url}@1", f"{url}@2")
    assert differing.exit_code == 1
    assert holdfast("ckpt", "prune", url, "--keep", "latest(1)", "--dry-run").exit_code == 0
    pruned = holdfast("ckpt", "prune", url, "--keep", "latest(1)")
    assert pruned.exit_code == 0, pruned.stderr
    assert "removed step 2" in pruned.stderr
    listed = json.loads(holdfast("ckpt", "ls", url, "--json").stdout)
    assert [row["step"] for row in listed["steps"]] == [3]
    faulty.fail("GET", "safetensors", corrupt, times=100)
    damaged = holdfast("ckpt", "verify", url)
    assert damaged.exit_code == 1
    assert "block 0" in damaged.stdout


def test_a_store_that_does_not_answer_is_announced(
    faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_LOOK", StoreOptions(retry_s=1.0))
    monkeypatch.setattr(terminal, "_SILENT_S", 0.01)
    faulty.fail("GET", "", status(503, "SlowDown"), times=1000)
    done = holdfast("ckpt", "ls", faulty.url("run"))
    assert done.exit_code == 2
    assert done.stderr.startswith(f"{faulty.url('run')} has not answered yet; trying for about 1 s\nerror: ")
    assert done.stdout == ""


def test_mistakes_are_told_without_a_traceback(faulty: FaultyStore) -> None:
    missing = holdfast("ckpt", "ls", "s3://no-such-bucket/run")
    nothing = holdfast("ckpt", "ls", faulty.url("none"))
    faulty.fail("GET", "", status(403, "InvalidAccessKeyId"), times=100)
    denied = holdfast("ckpt", "verify", faulty.url("run"))
    unknown = holdfast("ckpt", "ls", "ftp://host/x")
    for done, message, hint in (
        (missing, "NoSuchBucket", "create the bucket"),
        (nothing, "there is nothing at s3://", "saves its steps in"),
        (denied, "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
        (unknown, "no place that Holdfast knows", "s3://bucket/prefix"),
    ):
        assert done.exit_code == 2
        assert message in done.stderr
        assert "hint: " in done.stderr
        assert hint in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
