"""A worker of a JAX world, without an agent: joins a seat that it is told, sums over the world, and leaves.

    python -m tests.jax.world_worker [rehearse]

With `rehearse` it traces that step before it has a seat.

Standard input: "REPLICA INDEX ATTEMPT WORKERS" gives the seat; "sum" does a collective; "step FOLDER" runs a
training step out of a bundle in a folder; "leave" leaves.
HOLDFAST_COORD and HOLDFAST_FOLDER say where the run is.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from holdfast.coord import CoordClient
from holdfast.jax import abstract_mesh
from holdfast.supervise.hooks import RunInfo, start_world
from holdfast.supervise.messages import Seat
from holdfast.xla import compiled
from tests.xla.programs import KEY, flat, jitted, placed, values

# gloo greets on standard output, which is for reports alone.
_REPORTS = os.dup(1)
os.dup2(2, 1)

P: Any = jax.sharding.PartitionSpec  # shipped without types


def report(saw: str, **fields: object) -> None:
    os.write(_REPORTS, json.dumps({"saw": saw, **fields}).encode() + b"\n")


def total(value: float) -> float:
    """The sum of `value` over all processes, by a collective."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    size = jax.device_count()
    mine = np.full(1, value, np.float32)
    array = jax.make_array_from_callback((size,), NamedSharding(mesh, P("x")), lambda index: mine)
    return float(jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))(array))


def rehearse() -> None:
    """Trace the step for the mesh that there will be."""
    fn, places = jitted(abstract_mesh({"x": 2}))
    struct: Any = jax.ShapeDtypeStruct
    fn.trace(*jax.tree.map(lambda a, s: struct(a.shape, a.dtype, sharding=s), values(), places))


def step(folder: str) -> None:
    """One step over all devices, by an executable out of a bundle."""
    began = time.monotonic()
    fn, args = placed(Mesh(np.array(jax.devices()), ("x",)))
    made = compiled(fn, *args, folder=folder, key=KEY, name="step")
    out = made(*args)
    bits = flat(out).hex()
    seconds = time.monotonic() - began
    report("step", source=made.source, digest=made.digest, bits=bits, seconds=seconds)


def main() -> None:
    if sys.argv[1:] == ["rehearse"]:
        rehearse()
    report("imported")
    replica, index, attempt, workers = map(int, sys.stdin.readline().split())
    run = RunInfo("demo", Path(os.environ["HOLDFAST_FOLDER"]), 0)
    with CoordClient(os.environ["HOLDFAST_COORD"], run="demo", name=f"worker {index}") as client:
        began = time.monotonic()
        leave = start_world(client, Seat(replica, index, attempt), workers, run)
        report("joined", seconds=time.monotonic() - began)
        report("sum", value=total(index + 1.0), devices=jax.device_count(), process=jax.process_index())
        for line in sys.stdin:
            if line.strip() == "leave":
                break
            if line.startswith("step "):
                step(line.split()[1])
            else:
                report("sum", value=total(index + 1.0))
        leave()
    report("left")


if __name__ == "__main__":
    main()
