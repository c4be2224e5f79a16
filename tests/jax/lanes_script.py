"""A training script of replicas of two workers each, with lanes: one of the second kills itself if told to.

    holdfast launch --replicas 2 --workers-per-replica 2 --lanes 4 tests/jax/lanes_script.py FOLDER [AT]

Inside a replica the two are one JAX world, whose programs add over gloo; between replicas lanes are added. At
the end each worker of the first replica writes the bits of its state.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import holdfast
from tests.xla.programs import flat

STEPS = 200
placed: Any = jax.make_array_from_process_local_data
constrained: Any = jax.lax.with_sharding_constraint


def main() -> None:
    folder = Path(sys.argv[1])
    fails_at = int(sys.argv[2]) if len(sys.argv) > 2 else -1
    with holdfast.join() as run:
        assert jax.process_count() == 2
        first = {device.process_index: device for device in reversed(jax.devices())}
        mesh = Mesh(np.array([first[0], first[1]]), ("x",))
        rows = NamedSharding(mesh, PartitionSpec("x"))  # type: ignore[no-untyped-call]

        def array(values: Any) -> jax.Array:
            return jax.make_array_from_callback(values.shape, rows, values.__getitem__)

        @jax.jit
        def lane_sum(state: Any, batch: jax.Array) -> Any:
            # Every row of the sum depends on all rows of the batch: XLA adds them up over gloo.
            pull = jax.grad(lambda w: jnp.sum(jnp.tanh(batch @ w) ** 2))(state["w"])
            return {"w": constrained(pull, rows)}

        @jax.jit
        def apply(state: Any, total: Any) -> Any:
            return {"w": state["w"] - 0.01 * total["w"]}

        state = run.restore(lambda: {"w": array(np.linspace(-1, 1, 8 * 6, dtype=np.float32).reshape(8, 6))})
        for step in run.steps(until=STEPS, save_every=50):
            failed = folder / "failed"
            if step.index == fails_at and (run.replica, run.index) == (1, 1) and not failed.exists():
                failed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if failed.exists() and run.replica == 1:
                (folder / "back").touch()
            if step.index > fails_at >= 0 and not (folder / "back").exists():
                # Work: steps go on, and take as long as real ones, so that there are some to come back to.
                time.sleep(0.1)
            for lane in step.lanes:
                values = np.random.default_rng([step.index, lane]).standard_normal((4, 8), np.float32)
                step.add(lane, lane_sum(state, array(values)))
            # A worker gets its own part of the sum, as numpy arrays.
            whole = placed(rows, step.total()["w"])
            state = apply(state, {"w": whole})
            jax.block_until_ready(state)  # type: ignore[no-untyped-call]
            step.done(state)
    if run.replica == 0:
        (folder / f"bits-{run.index}").write_bytes(flat(state))


if __name__ == "__main__":
    main()
