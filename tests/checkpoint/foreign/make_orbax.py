"""Makes the golden Orbax checkpoints: `python -m tests.checkpoint.foreign.make_orbax`, with orbax-checkpoint.

Of the version that is installed. Every layout that it writes, from four devices: one tree with everything a
tree may hold, and the folder of a CheckpointManager with two items.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.checkpoint.foreign.golden import STATE, packed


class Adam(NamedTuple):
    """Like optax's state of the same kind."""

    count: Any
    mu: Any


def tree() -> dict[str, Any]:
    """The state, with the types of a real one: namedtuples, lists, tuples, scalars, keys, empty nodes."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    sharded = NamedSharding(mesh, PartitionSpec("x", "y"))  # type: ignore[no-untyped-call]
    state = {name: jnp.asarray(value) for name, value in STATE.items() if value.dtype != np.float64}
    return {
        "params": {
            "dense": {
                "kernel": jax.device_put(state["params/dense/kernel"], sharded),
                "bias": state["params/dense/bias"],
            },
            "norm": state["params/norm"],
            "f8": state["params/f8"],
        },
        "opt": (
            Adam(
                state["opt/0/count"],
                {"dense": {"kernel": jax.device_put(state["opt/0/mu/dense/kernel"], sharded)}},
            ),
            optax.EmptyState(),
        ),
        "layers": [{"w": STATE["layers/0/w"]}, {"w": np.asarray(STATE["layers/1/w"])}],
        "flags": state["flags"],
        "dots.and/slash~tilde": state["dots.and~1slash~0tilde"],
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "step": 7,
        "lr": 0.25,
        "done": False,
        "name": "golden",
        "nothing": None,
        "bare": {},
    }


def main() -> None:
    version = ocp.__version__
    work = Path(tempfile.mkdtemp())
    for ocdbt in (True, False):
        for zarr3 in (True, False):
            name = f"orbax-{version}-{'ocdbt' if ocdbt else 'plain'}-zarr{3 if zarr3 else 2}"
            handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
            with ocp.Checkpointer(handler) as checkpointer:
                checkpointer.save(work / name, tree())
            print(packed(work / name, name))
    items = {"params": tree()["params"]}
    with ocp.CheckpointManager(work / "manager", item_names=("state", "data")) as manager:
        for step in (5, 10):
            state = ocp.args.StandardSave(jax.tree.map(lambda value: value, items))
            data = ocp.args.JsonSave({"position": step})
            manager.save(step, args=ocp.args.Composite(state=state, data=data), metrics={"loss": 0.5})
        manager.wait_until_finished()
    print(packed(work / "manager", f"manager-orbax-{version}"))
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
