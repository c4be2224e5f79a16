# mypy: allow-untyped-defs, allow-untyped-calls
"""An ordinary SPMD program in JAX: one world, sharded over all its devices, supervised.

    python examples/one_world.py
    holdfast launch --replicas 1 --workers-per-replica 2 --parked 2 examples/one_world.py

There are no lanes: XLA sums the gradients. A failure replaces all processes; they go on from the last save.
"""

import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import holdfast

ROWS, DIM = 64, 32


def init(replicated):
    w = jax.random.normal(jax.random.key(0), (DIM, 1)) / 8
    return jax.device_put({"w": w, "velocity": jnp.zeros_like(w)}, replicated)


def batch(step, sharded):
    rng = np.random.Generator(np.random.Philox(key=[step, 0]))
    x = rng.standard_normal((ROWS, DIM), dtype=np.float32)
    return jax.make_array_from_callback(x.shape, sharded, lambda index: x[index])


@jax.jit
def train(state, x):
    def loss(w):
        return ((jnp.tanh(x @ w) - jnp.sin(x.sum(axis=1, keepdims=True))) ** 2).mean()

    value, grad = jax.value_and_grad(loss)(state["w"])
    velocity = 0.9 * state["velocity"] + grad
    return {"w": state["w"] - 0.05 * velocity, "velocity": velocity}, value


def main(steps):
    with holdfast.join(name="one-world", samples_per_step=ROWS) as run:
        mesh = jax.make_mesh((jax.device_count(),), ("data",))
        replicated, sharded = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
        state = run.restore(lambda: init(replicated))
        for step in run.steps(until=steps, save_every=50):
            state, loss = train(state, batch(step.index, sharded))
            step.done(state, {"loss": float(loss)})
        leaves = [np.asarray(leaf.addressable_data(0)).tobytes() for leaf in jax.tree.leaves(state)]
        if run.slot == 0:
            print(f"{steps} steps, state {hashlib.sha256(b''.join(leaves)).hexdigest()[:16]}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
