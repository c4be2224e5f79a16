"""`holdfast transfer serve|pull|bench`, between real processes."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.arrays import flatten
from holdfast.cli import movement, treefile
from tests.cli.saved import answer, flip, holdfast, part, save, tree

pytestmark = pytest.mark.process

DEADLINE_S = 60.0


class Serving:
    """`holdfast transfer serve` in a process, ready."""

    def __init__(self, process: subprocess.Popen[str], about: dict[str, Any]) -> None:
        self.process, self.about = process, about
        self.address: str = about["address"]
        self._notes: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._notes.put(line)

    def await_note(self, text: str) -> None:
        """Return when it said that on stderr."""
        while text not in self._notes.get(timeout=DEADLINE_S):
            pass

    def stop(self, number: int) -> int:
        """Its exit code after a signal."""
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        """End it; returns when nobody reads what it said any more."""
        self.process.kill()
        self._reader.join(DEADLINE_S)


@contextmanager
def served(*words: str | Path, env: dict[str, str] | None = None) -> Iterator[Serving]:
    command = [sys.executable, "-m", "holdfast.cli", "transfer", "serve", *map(str, words), "--json"]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **(env or {})}
        ) as process,
        ExitStack() as over,
    ):
        over.callback(process.kill)
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        serving = Serving(process, json.loads(line))
        over.callback(serving.close)
        yield serving


def leaves(path: Path) -> dict[str, Any]:
    return dict(flatten(treefile.read(str(path), lambda _: None))[0])


def test_a_checkpoint_is_served_and_pulled_into_a_file(tmp_path: Path) -> None:
    saved = save(tmp_path / "ckpt", {100: tree(1), 200: tree(2)})
    with served(saved, "--name", "policy") as serving:
        assert {key: serving.about[key] for key in ("name", "version", "arrays")} == {
            "name": "policy",
            "version": 200,
            "arrays": 3,
        }
        out = tmp_path / "out.safetensors"
        found = answer("transfer", "pull", serving.address, "policy", "--to", out)
        assert (found["version"], found["bytes"], found["arrays"]) == (200, 58, 3)
        assert found["transports"] == {serving.address: "memfd"}
        assert found["verified"] is True
        serving.await_note("committed")
        assert serving.stop(signal.SIGTERM) == 0
    got = leaves(out)
    np.testing.assert_array_equal(got["params/w"], tree(2)["params"]["w"])
    assert got["params/b"].dtype == tree()["params"]["b"].dtype
    assert float(got["lr"]) == 0.1


@pytest.mark.parametrize("kind", treefile.KINDS)
def test_a_file_is_served_and_looked_at(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"weights{kind}"
    treefile.write(str(path), {"w": np.arange(1000.0)})
    with served(path, "--version", "7") as serving:
        done = holdfast("transfer", "pull", serving.address, "weights")
        assert done.exit_code == 0, done.stderr
        assert "weights version 7: 1 array, 7.8 KiB in" in done.stdout
        assert "verified" in done.stdout
        assert f"from {serving.address} by memfd" in done.stdout
        assert serving.stop(signal.SIGINT) == 0
    assert os.listdir(tmp_path) == [path.name]


def test_a_step_is_named_with_an_at_sign(tmp_path: Path) -> None:
    saved = save(tmp_path / "ckpt", {100: tree(1), 200: tree(2)})
    with served(f"{saved}@100") as serving:
        found = answer("transfer", "pull", serving.address, "ckpt")
    assert (found["version"], found["file"]) == (100, None)


def test_what_a_folder_is_served_as(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save(tmp_path / "k" / "ckpt", {100: tree(1)})
    monkeypatch.chdir(tmp_path)
    for path in ("k", "k/", "k@100", saved.parent):
        assert movement.loaded(str(path))[1:] == ("k", 100)
    for path in (saved, f"{saved}@100", saved / "step-00000100"):
        assert movement.loaded(str(path))[1:] == ("ckpt", 100)


def test_a_token_keeps_others_out(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"a token for the tests of transfers\n")
    (tmp_path / "other").write_bytes(b"another token, as long as the first\n")
    np.savez(tmp_path / "a.npz", w=np.ones(3))
    with served(tmp_path / "a.npz", "--token-file", tmp_path / "token") as serving:
        for words in ([], ["--token-file", tmp_path / "other"], ["--run", "other"]):
            assert refused("pull", serving.address, "a", "--timeout", "5", *words).startswith("error: ")
        found = answer("transfer", "pull", serving.address, "a", "--token-file", tmp_path / "token")
        assert found["version"] == 0


def refused(*words: str | Path) -> str:
    """What a command says when it does not do what was asked."""
    done = holdfast("transfer", *words)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert "unexpected" not in done.stderr
    return done.stderr


def test_names_and_versions_that_are_not_there(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", w=np.ones(3))
    with served(tmp_path / "a.npz") as serving:
        # At once: a name that is not there is not waited for.
        misspelt = refused("pull", serving.address, "b", "--timeout", "500")
        assert f"{serving.address}: 'b' was never published\n\nhint: published here: a\n" in misspelt
        assert serving.address in refused("pull", serving.address, "a", "--version", "3", "--timeout", "0.5")
    assert "tcp://" in refused("pull", serving.address, "a", "--timeout", "5")


def test_mistakes_are_found_before_anything_is_moved(tmp_path: Path) -> None:
    (tmp_path / "there.npz").touch()
    address = "tcp://127.0.0.1:1"
    assert "exists" in refused("pull", address, "a", "--to", tmp_path / "there.npz")
    assert "no .npz or .safetensors" in refused("pull", address, "a", "--to", tmp_path / "a.bin")
    assert "is no address" in refused("pull", "nonsense", "a")
    assert "no folder" in refused("serve", tmp_path / "nothing")
    np.savez(tmp_path / "a.npz", w=np.ones(3))
    assert "without a token" in refused("serve", tmp_path / "a.npz", "--bind", "0.0.0.0:0")


def test_a_damaged_checkpoint_is_not_served(tmp_path: Path) -> None:
    saved = save(tmp_path / "ckpt", {100: tree(1)})
    flip(part(saved, 100), -1)
    assert "damaged" in refused("serve", saved)


@pytest.mark.parametrize("words", [[], ["--arrays", "300"]])
def test_the_self_test_shows_every_transport(words: Sequence[str]) -> None:
    found = answer("transfer", "bench", "--mib", 1, "--rounds", 1, *words)
    assert found["bytes"] == 1 << 20
    seen = [(row["transport"], row["checked"]) for row in found["rows"]]
    assert seen == [("memfd", True), ("memfd", False), ("tcp", True), ("tcp", False)]
    assert all(row["gb_per_s"] > 0 and len(row["seconds"]) == 1 for row in found["rows"])


def test_the_self_test_prints_a_table() -> None:
    done = holdfast("transfer", "bench", "--mib", 1, "--rounds", 1)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[0].split() == ["TRANSPORT", "CHECKSUMS", "MEDIAN", "GB/S"]
    assert len(done.stdout.splitlines()) == 5
