"""Saves a torch distributed checkpoint from several processes, with torch: see `main`.

python -m tests.checkpoint.foreign.make_dcp            the golden ones
python -m tests.checkpoint.foreign.make_dcp OUT WORLD  one by WORLD processes, in OUT
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.checkpoint.foreign.golden import STATE, packed

SHARDED = {"params/dense/kernel": 0, "opt/0/mu/dense/kernel": 1, "layers/1/w": 0}
"""What is sharded, and along which dimension."""


def tensor(array: np.ndarray[Any, Any]) -> Any:
    """A torch tensor with the same bits."""
    name = array.dtype.name
    if name in ("bfloat16", "float8_e4m3fn"):
        raw = array.view(np.uint16 if name == "bfloat16" else np.uint8)
        return torch.from_numpy(raw.copy()).view(getattr(torch, name))
    return torch.from_numpy(array.copy())


def tree(world: int) -> dict[str, Any]:
    """The state as torch programs have it: tensors sharded over all ranks, numbers and text beside them."""
    found = {name: tensor(array) for name, array in STATE.items()}
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        for name, dim in SHARDED.items():
            found[name] = distribute_tensor(found[name], mesh, [Shard(dim)])
        found["flags"] = distribute_tensor(found["flags"], mesh, [Replicate()])
    return {
        "params": {
            "dense": {"kernel": found["params/dense/kernel"], "bias": found["params/dense/bias"]},
            "norm": found["params/norm"],
            "f8": found["params/f8"],
        },
        "opt": [{"count": found["opt/0/count"], "mu": {"dense": {"kernel": found["opt/0/mu/dense/kernel"]}}}],
        "layers": [{"w": found["layers/0/w"]}, {"w": found["layers/1/w"]}],
        "flags": found["flags"],
        "dots.and/slash~tilde": found["dots.and~1slash~0tilde"],
        "empty": torch.zeros(0, 3),
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "groups": [{"lr": 0.25, "betas": (0.9, 0.95), "params": [0, 1], "foreach": None}],
        "step": 7,
        "name": "golden",
        "blob": b"\x00\xff",
        "big": 2**70,
        "ordered": OrderedDict(a=1),
        "device": torch.device("cpu"),
    }


def save(out: str, meeting: str) -> None:
    """One rank's part of the save; the ranks find each other through a file."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    dcp.save(tree(world), storage_writer=dcp.FileSystemWriter(out, thread_count=2))
    dist.destroy_process_group()


def saved(out: Path, world: int, timeout_s: float = 120.0) -> None:
    """Save with `world` real processes, and wait for them."""
    with tempfile.TemporaryDirectory() as meeting:
        running = []
        for rank in range(world):
            env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world)}
            program = [sys.executable, "-m", "tests.checkpoint.foreign.make_dcp"]
            words = ["rank", str(out), f"file://{meeting}/at"]
            running.append(subprocess.Popen([*program, *words], env=env))
        try:
            for process in running:
                if process.wait(timeout_s):
                    raise RuntimeError(f"a rank ended with {process.returncode}")
        finally:
            for process in running:
                process.kill()


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        save(*sys.argv[2:])
        return
    if len(sys.argv) == 3:
        saved(Path(sys.argv[1]), int(sys.argv[2]))
        return
    version = torch.__version__.partition("+")[0]
    work = Path(tempfile.mkdtemp())
    for world in (1, 4):
        name = f"dcp-{version}-world{world}"
        saved(work / name, world)
        print(packed(work / name, name))
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
