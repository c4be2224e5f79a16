"""A replica of several workers, one JAX world over gloo: `group_trainer.py STEPS SAVE_EVERY`."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import holdfast
from bench.recovery import model
from holdfast.jax import abstract_mesh
from holdfast.xla import compiled

WORKERS = 2


@jax.jit
def train(state: Any, tokens: jax.Array) -> Any:
    """A step on all rows of the batch."""
    return model.apply(state, model.lane_grads(state, tokens))


def rehearse() -> None:
    """Trace, for the mesh that there will be: no device may be touched before the world has begun."""
    mesh = abstract_mesh({"data": WORKERS})
    shapes = jax.eval_shape(model.init)
    everywhere = NamedSharding(mesh, P())
    state = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere), shapes)
    rows = (model.ROWS, model.LENGTH + 1)
    train.trace(state, jax.ShapeDtypeStruct(rows, jnp.int32, sharding=NamedSharding(mesh, P("data"))))


def whole(everywhere: NamedSharding, array: Any) -> Any:
    """An array that every process has whole, without a program and without asking the others."""
    return jax.make_array_from_process_local_data(everywhere, np.asarray(array))


def main() -> None:
    with holdfast.join(rehearse=rehearse, world="jax") as run:
        mesh = Mesh(np.array(jax.devices()), ("data",))
        everywhere, rowwise = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
        state = run.restore(lambda: jax.tree.map(lambda a: whole(everywhere, a), model.host_init()))
        share = model.ROWS // WORKERS
        tokens = jax.make_array_from_process_local_data(rowwise, model.rows(0, run.index * share, share))
        step_of = compiled(train, state, tokens, folder=run.folder / "bundles", key=run.key, name="train")
        for step in run.steps(until=int(sys.argv[1]), save_every=int(sys.argv[2])):
            local = model.rows(step.index, run.index * share, share)
            state = step_of(state, jax.make_array_from_process_local_data(rowwise, local))
            jax.block_until_ready(state)
            step.done(state, {})


if __name__ == "__main__":
    main()
