# mypy: allow-untyped-defs, allow-untyped-calls
"""Least squares in plain numpy, over any number of replicas, without JAX.

    python examples/replicas_numpy.py                                  # alone
    holdfast launch --replicas 3 --parked 1 examples/replicas_numpy.py # kill any worker: the last line stays

Every lane is a microbatch that any replica can make; the sum over lanes is the same to the last bit whoever
computed them.
"""

import hashlib
import sys

import numpy as np

import holdfast

DIM, ROWS, RATE = 64, 32, np.float32(0.05)
TRUTH = np.linspace(-1, 1, DIM, dtype=np.float32)


def init():
    return {"w": np.zeros(DIM, np.float32), "velocity": np.zeros(DIM, np.float32)}


def batch(step, lane):
    rng = np.random.Generator(np.random.Philox(key=[step, lane]))
    x = rng.standard_normal((ROWS, DIM), dtype=np.float32)
    return x, x @ TRUTH + np.float32(0.01) * rng.standard_normal(ROWS, dtype=np.float32)


def lane_grads(state, step, lane):
    x, y = batch(step, lane)
    error = x @ state["w"] - y
    return {"grad": x.T @ error / ROWS, "loss": np.float64((error**2).mean()), "rows": np.int64(ROWS)}


def apply(state, total, lanes=8):
    velocity = np.float32(0.9) * state["velocity"] + total["grad"] / np.float32(lanes)
    return {"w": state["w"] - RATE * velocity, "velocity": velocity}


def main(steps):
    with holdfast.join(name="replicas-numpy", samples_per_step=8 * ROWS) as run:
        state = run.restore(init)
        for step in run.steps(until=steps):
            for lane in step.lanes:
                step.add(lane, lane_grads(state, step.index, lane))
            total = step.total()
            state = apply(state, total)
            step.done(state, {"loss": float(total["loss"]) / 8})
        digest = hashlib.sha256(state["w"].tobytes() + state["velocity"].tobytes()).hexdigest()
        print(f"{steps} steps, off by {np.abs(state['w'] - TRUTH).max():.4f}, state {digest[:16]}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
