"""One process of a JAX world on CPU, with two devices: saves and loads a tree of global arrays.

    python -m tests.jax.worker PORT RANK WORLD ROOT ACTION...

An action is `save:STEP`, `load:STEP`, or `arm:RANK:FAULTS`, which arms the faults in that rank alone.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from holdfast import faults
from holdfast.checkpoint import Checkpointer
from holdfast.errors import HoldfastError
from tests.checkpoint.trainer import report

P: Any = jax.sharding.PartitionSpec  # shipped without types
DEADLINE_S = 20.0
"""Of saves: far beyond what one takes on a slow disk, and what others wait for a rank that is killed."""


def host_values(step: int) -> dict[str, np.ndarray[Any, Any]]:
    """The whole arrays; 12 rows and columns are cut by 2, 4 and 6 devices alike."""
    rng = np.random.default_rng(step)
    return {
        "cut": rng.standard_normal((12, 600_000), np.float32),
        "columns": rng.standard_normal((5, 12, 7), np.float32),
        "pairs": rng.integers(0, 99, (12, 12), np.int32),
        "replicated": rng.standard_normal(1000, np.float32),
        "empty": np.zeros((0, 12), np.float32),
    }


def tree(step: int) -> dict[str, Any]:
    devices = np.array(jax.devices())
    flat, grid = Mesh(devices, ("x",)), Mesh(devices.reshape(-1, 2), ("x", "y"))
    places = {
        "cut": NamedSharding(flat, P("x")),
        "columns": NamedSharding(flat, P(None, "x")),
        "pairs": NamedSharding(grid, P(None, "y")),  # every process holds a copy of each half
        "replicated": NamedSharding(flat, P()),
        "empty": NamedSharding(flat, P()),
    }
    arrays = {
        name: jax.make_array_from_callback(values.shape, places[name], values.__getitem__)
        for name, values in host_values(step).items()
    }
    return {"arrays": arrays, "host": np.full(10, step), "step": step}


def check(found: dict[str, Any], step: int) -> bool:
    want = host_values(step)
    return (
        found["step"] == step
        and bool((found["host"] == step).all())
        and all(
            np.asarray(shard.data).tobytes() == want[name][shard.index].tobytes()
            for name, array in found["arrays"].items()
            for shard in array.addressable_shards
        )
    )


def act(ckpt: Checkpointer, action: str, rank: int) -> None:
    what, _, rest = action.partition(":")
    if what == "arm":
        who, _, spec = rest.partition(":")
        if int(who) == rank:
            faults.arm(spec)
        return
    step = int(rest)
    try:
        if what == "save":
            ckpt.save(step, tree(step)).durable(60.0)
            report("saved", step=step)
        else:
            report("loaded", step=step, right=check(ckpt.load(into=tree(0), step=step), step))
    except HoldfastError as error:
        report("failed", step=step, error=type(error).__name__, message=error.message)


def main() -> None:
    port, rank, world, root, *actions = sys.argv[1:]
    if int(world) > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", int(world), int(rank))
    assert jax.device_count() == 2 * int(world)
    with Checkpointer(root, keep=None, deadline_s=DEADLINE_S) as ckpt:
        for action in actions:
            act(ckpt, action, int(rank))
    report("closed")
    # The first process hosts JAX's coordinator: when it goes, JAX aborts the others.
    sys.stdin.readline()
    # Leaving the world in an orderly way would wait for a rank that was killed.
    os._exit(0)


if __name__ == "__main__":
    main()
