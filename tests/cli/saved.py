"""Small checkpoints to look at, ways to damage them, and the command run in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
from click.testing import CliRunner, Result

from holdfast import format as fmt
from holdfast.checkpoint import Checkpointer
from holdfast.cli import main
from holdfast.clock import ManualClock

NOON = 1_700_000_000.0
"""2023-11-14 22:13:20 UTC: the `now` of every command run by `holdfast`."""


def holdfast(*args: str | Path | int) -> Result:
    """Run the command; exit code, stdout and stderr of it."""
    words = list(map(str, args))
    return CliRunner().invoke(main, words, prog_name="holdfast", obj=ManualClock(wall=NOON))


def answer(*args: str | Path | int) -> Any:
    """The JSON that a command prints with --json."""
    return json.loads(holdfast(*args, "--json").stdout)


def tree(seed: float = 0.0) -> dict[str, Any]:
    """A small training state."""
    return {
        "params": {
            "w": np.arange(12, dtype=np.float32).reshape(3, 4) + np.float32(seed),
            "b": np.ones(3, ml_dtypes.bfloat16),
        },
        "opt": [np.zeros((), np.int32)],
        "lr": 0.1,
    }


def save(path: Path, trees: Mapping[int, Any], metas: Mapping[int, Any] | None = None) -> Path:
    """Save trees by step; each was made an hour after the one before, the last an hour before NOON."""
    with Checkpointer(path, writer="thread", journal=False, keep=None) as ckpt:
        for step, state in trees.items():
            ckpt.save(step, state, meta=(metas or {}).get(step)).durable(timeout_s=30)
    for hours, step in enumerate(sorted(trees, reverse=True), 1):
        edit_manifest(path, step, created=NOON - 3_600 * hours)
    return path


def steps_on_disk(path: Path) -> list[int]:
    return sorted(s for p in path.iterdir() if (s := fmt.parse_step_folder(p.name)) is not None)


def manifest_path(path: Path, step: int) -> Path:
    return path / fmt.step_folder(step) / fmt.MANIFEST


def edit_manifest(path: Path, step: int, **changes: Any) -> None:
    """Change fields of a manifest; its root is made right again."""
    file = manifest_path(path, step)
    manifest = fmt.decode_manifest(file.read_bytes())
    file.write_bytes(fmt.encode_manifest(msgspec.structs.replace(manifest, **changes)))


def newer_version(path: Path, step: int) -> None:
    """Make a step look as if a later format had written it."""
    file = manifest_path(path, step)
    body = file.read_bytes()[43:].replace(b'"version":1', b'"version":99', 1)
    file.write_bytes(b'{"root":"' + fmt.digest(body).encode() + b'",' + body)


def part(path: Path, step: int) -> Path:
    """The data file of a step with one part."""
    (found,) = (path / fmt.step_folder(step)).glob("*.safetensors")
    return found


def flip(file: Path, at: int) -> None:
    """Flip a bit of the byte at `at`; negative counts from the end."""
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(bytes(data))


def leave_uncommitted(path: Path, step: int, nbytes: int = 10) -> Path:
    """What a save that died half-way leaves."""
    folder = path / fmt.step_folder(step)
    os.makedirs(folder)
    file = folder / fmt.data_name(0, "dead-1")
    file.write_bytes(bytes(nbytes))
    return file
