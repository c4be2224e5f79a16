"""What a checkpoint folder must look like when nobody is at work on it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from holdfast import journal
from holdfast.checkpoint import Checkpointer
from holdfast.format import MANIFEST, parse_file_name, parse_step_folder, read_manifest
from holdfast.journal import Event
from holdfast.storage import LocalStore
from tests.checkpoint import trainer

WORK = ".holdfast"


def events(root: Path, *kinds: type) -> list[Any]:
    """The events of the folder's journal, of the given kinds."""
    found: list[Event | journal.Unknown] = [record.event for record in journal.read(root / "journal.jsonl")]
    return [event for event in found if not kinds or isinstance(event, kinds)]


def check_clean(root: Path) -> None:
    """Fail unless the folder holds whole steps and nothing else."""
    store = LocalStore(root)
    for path, _, names in os.walk(root):
        assert not [name for name in names if name.startswith(".tmp-")], path
    for name in store.names():
        assert name in (WORK, "journal.jsonl") or parse_step_folder(name) is not None, name
        if parse_step_folder(name) is None:
            continue
        manifest = read_manifest(store, name)
        for file in store.names(name):
            parsed = parse_file_name(file)
            assert parsed is not None, file
            assert file == MANIFEST or parsed.attempt == manifest.save.attempt, f"{name}/{file}"
            assert not store.is_busy(name, file)


def check_loads(root: Path, step: int, size: int = trainer.SIZE) -> None:
    """Fail unless the newest loadable step is `step` with the trainer's values, and verifies."""
    with Checkpointer(root, journal=False) as ckpt:
        tree = ckpt.load()
        assert ckpt.last_load is not None
        assert ckpt.last_load.step == step
        assert trainer.same(tree, step, size)
        assert ckpt.verify(step) == []


def check_next_start(root: Path, step: int) -> None:
    """Fail unless a new run saves `step` and leaves only whole steps behind."""
    tree = {"x": np.arange(5)}
    with Checkpointer(root, keep=None, writer="thread", journal=False) as ckpt:
        ckpt.save(step, tree).durable(60.0)
        assert np.array_equal(ckpt.load(step=step)["x"], tree["x"])
    check_clean(root)


def damage(path: Path, offset: int = -1) -> None:
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def part_file(root: Path, step: int, part: int = 0) -> Path:
    """The data file of a step."""
    (found,) = (root / f"step-{step:08d}").glob(f"part-{part:05d}.*.safetensors")
    return found
