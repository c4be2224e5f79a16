"""The file by which an agent tells its vault whose states to copy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.checkpoint import Checkpointer
from holdfast.vault.neighbourhood import named_neighbours
from tests.checkpoint.children import TIMEOUT_S, Children
from tests.vault.nodes import Node
from tests.vault.trainer import RUN, TOKEN, state

SMALL = 1 << 16


def checkpointer(node: Node, root: Path) -> Checkpointer:
    where = {"writer": node.path, "slots": 2, "serve": "127.0.0.1:0", "run": RUN, "token": TOKEN}
    return Checkpointer(root, rank=0, world=1, **where)  # type: ignore[arg-type]


def test_a_file_that_is_not_there_names_nobody_and_lines_that_say_nothing_are_left_out(
    tmp_path: Path,
) -> None:
    path = tmp_path / "neighbours"
    assert named_neighbours(str(path)) == {}
    path.write_bytes(b"0=127.0.0.1:1\n\n=x\n3=\n12=file:/runs/a=b/caf\xe9.address\n")
    where = os.fsdecode(b"file:/runs/a=b/caf\xe9.address")
    assert named_neighbours(str(path)) == {"0": "127.0.0.1:1", "12": where}


@pytest.mark.process
def test_a_vault_copies_from_whoever_is_named_at_the_time(
    children: Children, tmp_path: Path, root: Path
) -> None:
    a, b = Node(children, tmp_path, "a"), Node(children, tmp_path, "b")
    a.start()
    path = tmp_path / "neighbours"
    b.start("--neighbourhood", path)
    with checkpointer(a, root) as ckpt:
        ckpt.save(1, state(1, SMALL)).durable(60)
        path.write_text(f"a=file:{a.path}.address\n")
        b.await_steps(1, origin="a")
        assert b.vault is not None
        # Another vault in its place knows whom to copy, too.
        b.vault.kill()
        b.vault.end()
        b.start("--neighbourhood", path)
        ckpt.save(2, state(2, SMALL)).durable(60)
        b.await_steps(2, origin="a")
        # It follows another node by now, and has seen that when that one's state is there.
        c = Node(children, tmp_path, "c")
        c.start()
        path.write_text(f"c=file:{c.path}.address\n")
        with checkpointer(c, tmp_path / "other") as other:
            other.save(7, state(7, SMALL)).durable(60)
            b.await_steps(7, origin="c")
            ckpt.save(3, state(3, SMALL)).durable(60)
            other.save(8, state(8, SMALL)).durable(60)
            b.await_steps(8, origin="c")
            b.await_steps(2, origin="a")


@pytest.mark.process
def test_one_way_to_name_neighbours_is_enough(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast.vault", "--listen", str(tmp_path / "sock")]
    command += ["--neighbour", "a=127.0.0.1:1", "--neighbourhood", str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, "one of them" in done.stderr) == (78, True)
