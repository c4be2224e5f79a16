# mypy: allow-untyped-defs, allow-untyped-calls
"""A small network in JAX, over any number of replicas, each with a JAX of its own.

python examples/replicas_jax.py
holdfast launch --replicas 3 --parked 1 examples/replicas_jax.py
"""

import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import holdfast

LANES, ROWS, DIM = 8, 16, 32


def init():
    a, b = jax.random.split(jax.random.key(0))
    params = {"in": jax.random.normal(a, (DIM, 64)) / 8, "out": jax.random.normal(b, (64, 1)) / 8}
    return {"params": params, "velocity": jax.tree.map(jnp.zeros_like, params)}


@jax.jit
def lane_grads(params, step, lane):
    x = jax.random.normal(jax.random.key(step * LANES + lane), (ROWS, DIM))
    y = jnp.sin(x.sum(axis=1, keepdims=True))
    return jax.grad(lambda p: ((jnp.tanh(x @ p["in"]) @ p["out"] - y) ** 2).mean())(params)


@jax.jit
def apply(state, grads):
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g / LANES, state["velocity"], grads)
    params = jax.tree.map(lambda p, v: p - 0.05 * v, state["params"], velocity)
    return {"params": params, "velocity": velocity}


def rehearse():
    state = init()
    grads = jax.tree.map(np.asarray, lane_grads(state["params"], 0, 0))  # as step.total() gives them
    jax.block_until_ready(apply(state, grads))


def main(steps):
    with holdfast.join(rehearse=rehearse, name="replicas-jax", samples_per_step=LANES * ROWS) as run:
        state = run.restore(init)
        for step in run.steps(until=steps):
            for lane in step.lanes:
                step.add(lane, lane_grads(state["params"], step.index, lane))
            state = apply(state, step.total())
            step.done(state)
        data = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state))
        print(f"{steps} steps, state {hashlib.sha256(data).hexdigest()[:16]}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
