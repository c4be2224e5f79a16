"""Places that cannot be looked at: every command says why, and never that nothing is there."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import Result

from holdfast.cli.on_disk import reached
from holdfast.errors import MissingPathError, StorageError, UsageError
from holdfast.storage import local_path
from holdfast.supervise.status import STATUS_FILE
from tests.cli.saved import answer, holdfast, save, tree

NOBODY = 65_534

READING = {
    "ckpt ls": ("ckpt", "ls", "{at}"),
    "ckpt ls of a URL": ("ckpt", "ls", "file://{at}"),
    "ckpt show": ("ckpt", "show", "{at}"),
    "ckpt show of a step": ("ckpt", "show", "{at}@3"),
    "ckpt verify": ("ckpt", "verify", "{at}"),
    "ckpt diff": ("ckpt", "diff", "{open}/saved", "{at}"),
    "ckpt prune": ("ckpt", "prune", "{at}", "--keep", "1"),
    "ckpt import": ("ckpt", "import", "{at}", "{open}/new"),
    "ckpt export": ("ckpt", "export", "{at}", "{open}/new"),
    "status of a run": ("status", "a", "--folder", "{at}"),
    "status of the last run": ("status", "--folder", "{at}"),
    "status of a path": ("status", "{at}"),
    "data build": ("data", "build", "{at}", "--out", "{open}/set"),
    "data show": ("data", "show", "{at}"),
    "hub show": ("hub", "show", "{at}"),
    "hub check": ("hub", "check", "{at}"),
    "hub show of a file": ("hub", "show", "{at}.safetensors"),
    "hub export": ("hub", "export", "{at}", "{open}/new"),
    "transfer serve": ("transfer", "serve", "{at}"),
    "transfer serve of a file": ("transfer", "serve", "{at}.safetensors"),
}
OTHERS = {
    "data build to": ("data", "build", "{open}/text.txt", "--out", "{at}"),
    "hub export to": ("hub", "export", "{open}/saved", "{at}"),
    "a mapping": ("hub", "export", "{open}/saved", "{open}/new", "--mapping", "{at}"),
    "transfer pull to": ("transfer", "pull", "tcp://127.0.0.1:1", "a", "--to", "{at}.npz"),
    "a token": ("coord", "status", "--coordinator", "tcp://127.0.0.1:1", "--token-file", "{at}"),
}
COMMANDS = READING | OTHERS
NOT_LISTING = {
    "data show", "status of a run", "status of a path", "hub show of a file", "transfer serve of a file"
}  # fmt: skip


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user can reach, with a checkpoint and a text in it."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-reached-"))
    folder.chmod(0o777)
    save(folder / "saved", {3: tree()})
    (folder / "text.txt").write_text("some text", encoding="utf-8")
    yield folder
    shutil.rmtree(folder)


@contextmanager
def as_another(folder: Path, mode: int) -> Iterator[None]:
    """While inside, `folder` has this mode, for a user to whom that matters."""
    before = stat.S_IMODE(folder.stat().st_mode)
    root = os.geteuid() == 0
    if root:
        try:
            os.seteuid(NOBODY)
        except OSError as error:
            pytest.skip(f"root cannot be another user here: {error}")
        os.seteuid(0)
    folder.chmod(mode)
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(before)


def kept_out(closed: Path, mode: int, *given: str | Path) -> Result:
    """What a command says to another user. What it needs is imported first: that user may see no Python."""
    holdfast(*given)
    with as_another(closed, mode):
        return holdfast(*given)


def words(name: str, place: Path, at: Path) -> list[str]:
    return [word.format(open=place, at=at) for word in COMMANDS[name]]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_path_below_a_folder_that_may_not_be_entered(name: str, place: Path) -> None:
    closed = place / "closed"
    closed.mkdir()
    given = words(name, place, closed / "inside")
    assert "Permission denied" not in holdfast(*given).stderr
    done = kept_out(closed, 0, *given)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Permission denied" in done.stderr
    assert f"hint: this user may not enter {closed}: check its owner and mode\n" in done.stderr


@pytest.mark.parametrize("name", [name for name in READING if name not in NOT_LISTING])
def test_a_folder_that_may_be_entered_and_not_listed(name: str, place: Path) -> None:
    closed = place / "closed"
    closed.mkdir()
    done = kept_out(closed, 0o711 if os.geteuid() == 0 else 0o311, *words(name, place, closed))
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Permission denied\n\nhint: check the owner and mode" in done.stderr


@pytest.mark.parametrize("name", [name for name in READING if "{at}.safetensors" not in READING[name]])
def test_a_folder_that_may_be_listed_and_not_entered(name: str, place: Path) -> None:
    """A run's checkpoints, one folder below, are not seen then."""
    closed = place / "closed"
    (closed / "ckpt").mkdir(parents=True)
    done = kept_out(closed, 0o744 if os.geteuid() == 0 else 0o444, *words(name, place, closed))
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Permission denied" in done.stderr
    assert f"hint: this user may not enter {closed}: check its owner and mode\n" in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_path_below_a_file(name: str, place: Path) -> None:
    done = holdfast(*words(name, place, place / "text.txt" / "inside"))
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Not a directory\n\nhint: a file stands where a folder is needed\n" in done.stderr


@pytest.mark.parametrize("name", [name for name in COMMANDS if "{at}" in COMMANDS[name]])
def test_links_that_lead_nowhere_or_in_a_circle(name: str, place: Path) -> None:
    link = place / "link"
    link.symlink_to(place / "gone")
    done = holdfast(*words(name, place, link))
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{link} is a link to {place}/gone, which is not there\n\nhint: mend the link" in done.stderr
    link.unlink()
    link.symlink_to(link)
    done = holdfast(*words(name, place, link))
    assert (done.exit_code, done.stdout) == (2, "")
    assert "symbolic links\n\nhint: check the path, and where the links on the way lead\n" in done.stderr


def test_the_config_of_a_run_that_may_not_be_read(place: Path) -> None:
    """It may say that the steps are elsewhere: nobody can say then that there are none."""
    run = place / "run"
    run.mkdir()
    config = run / "config.json"
    config.write_bytes(msgspec.json.encode({"checkpoint": {"folder": f"file://{place}/saved"}}))
    assert [one["step"] for one in answer("ckpt", "ls", run)["steps"]] == [3]
    done = kept_out(config, 0, "ckpt", "ls", run)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"cannot read {config}: Permission denied\n\nhint: " in done.stderr


def test_runs_that_may_not_be_entered_hide_no_others(place: Path) -> None:
    runs = place / "runs"
    (runs / "mine").mkdir(parents=True)
    (runs / "mine" / STATUS_FILE).write_text("{}", encoding="utf-8")
    (runs / "closed").mkdir()
    closed = runs / "closed"
    last, named = ("status", "--folder", runs), ("status", "nope", "--folder", runs)
    assert f"{runs}/mine/{STATUS_FILE} is no status" in kept_out(closed, 0, *last).stderr
    assert "hint: there are mine\n" in kept_out(closed, 0, *named).stderr
    (runs / "mine" / STATUS_FILE).unlink()
    assert f"this user may not enter {closed}" in kept_out(closed, 0, *last).stderr


def test_what_a_path_is(tmp_path: Path) -> None:
    assert local_path("runs/a") == "runs/a"
    assert local_path("file:///a%20b/c") == "/a b/c"
    assert local_path("file://localhost/a") == "/a"
    for text in ("file://elsewhere/a", "file://", "file:///a%00b"):
        with pytest.raises(UsageError, match="names") as caught:
            local_path(text)
        assert caught.value.hint is not None
    assert reached(str(tmp_path / "not" / "there"))
    (tmp_path / "file").touch()
    with pytest.raises(MissingPathError, match="Not a directory"):
        reached(str(tmp_path / "file" / "inside"))
    with pytest.raises(StorageError, match="too long") as long:
        reached("x" * 300)
    assert long.value.hint is not None


# ---- file:// is a path everywhere


@pytest.mark.parametrize("name", [name for name in COMMANDS if "URL" not in name])
def test_a_file_url_is_refused_like_the_path_that_it_names(name: str, place: Path) -> None:
    (place / "a file").touch()
    said = holdfast(*words(name, place, place / "a file" / "inside"))
    url = [word.format(open=place, at=f"file://{place}/a%20file/inside") for word in COMMANDS[name]]
    assert (said.exit_code, holdfast(*url).stderr) == (2, said.stderr)
    assert "file://" not in said.stderr
    url = [word.format(open=place, at="file://elsewhere/x") for word in COMMANDS[name]]
    done = holdfast(*url)
    assert done.exit_code == 2
    assert "names a file on another machine\n\nhint: write file:///path" in done.stderr


def test_a_file_url_is_taken_like_the_path_that_it_names(place: Path) -> None:
    def url(name: str) -> str:
        return f"file://{place}/{name}"

    saved = place / "saved"
    for command in (("ckpt", "ls"), ("ckpt", "show"), ("ckpt", "verify")):
        assert answer(*command, url("saved")) == answer(*command, saved)
    assert answer("ckpt", "show", f"{url('saved')}@3")["step"] == 3
    assert answer("ckpt", "diff", url("saved"), f"{url('saved')}@3")["equal"]
    assert answer("ckpt", "prune", url("saved"), "--keep", "1", "--dry-run")["kept"] == [3]
    built = answer("data", "build", url("text.txt"), "--out", url("a%20set"))
    assert built["path"] == f"{place}/a set"
    assert answer("data", "show", url("a%20set"))["tokens"] == built["tokens"]
    mapping = place / "names.json"
    mapping.write_text('{"rules": [{"leaf": "w", "tensors": ["w"]}], "ignore": []}', encoding="utf-8")
    save(place / "weights", {1: {"params": {"w": np.ones(3, np.float32)}}})
    made = holdfast("hub", "export", url("weights"), url("hub"), "--mapping", url("names.json"))
    assert made.exit_code == 0, made.stderr
    shown = answer("hub", "show", url("hub"))
    assert (shown["place"], [one["name"] for one in shown["tensors"]]) == (f"{place}/hub", ["w"])
    assert answer("hub", "check", url("hub/model.safetensors"))["ok"]
    assert sorted(one.name for one in place.iterdir() if "file:" in one.name) == []


def test_a_url_where_only_a_disk_will_do(tmp_path: Path) -> None:
    for given in (
        ("ckpt", "import", "s3://bucket/x", tmp_path / "new"),
        ("ckpt", "export", tmp_path, "s3://bucket/x"),
        ("data", "build", "s3://bucket/x", "--out", tmp_path / "set"),
        ("data", "show", "s3://bucket/x"),
        ("transfer", "pull", "tcp://127.0.0.1:1", "a", "--to", "s3://bucket/x"),
        ("coordinator", "--folder", tmp_path, "--discovery", "s3://bucket/x"),
        ("coordinator", "--folder", tmp_path, "--journal", "s3://bucket/x"),
    ):
        done = holdfast(*given)
        assert done.exit_code == 2
        assert "s3://bucket/x is not on a file system\n\nhint: " in done.stderr
        assert not list(tmp_path.iterdir())
