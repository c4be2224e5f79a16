"""What a snapshot into the vault costs a run's step: `snapshot_trainer.py STEPS MEGABYTES`.

Every other step saves. Each save is timed, from `step.done` to its return, and beside it one copy of the
same arrays by one thread into memory that is there. One line of JSON each.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import holdfast

ARRAYS = 25
PAUSE_S = 0.4
"""For the vault to write what it was given; what is measured is not how long it takes for that."""


@jax.jit
def advance(state: Any) -> Any:
    """The next state, all of it in new memory."""
    return jax.tree.map(lambda a: a + 1, state)


def copied(state: Any, into: list[np.ndarray[Any, Any]]) -> float:
    """Seconds of one copy of all arrays."""
    views = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    began = time.perf_counter()
    for source, target in zip(views, into, strict=True):
        np.copyto(target, source)
    return time.perf_counter() - began


def main() -> None:
    steps, floats = int(sys.argv[1]), int(float(sys.argv[2]) * 1e6 / 4 / ARRAYS)
    buffers = [np.ones(floats, np.float32) for _ in range(ARRAYS)]
    with holdfast.join() as run:
        state = run.restore(lambda: {f"w{n}": jnp.zeros(floats, jnp.float32) for n in range(ARRAYS)})
        for step in run.steps(until=steps, save_every=2):
            state = jax.block_until_ready(advance(state))
            time.sleep(PAUSE_S)
            spare = jax.block_until_ready(advance(state))
            memcpy_s = copied(spare, buffers)
            began = time.perf_counter()
            step.done(state, {})
            took = time.perf_counter() - began
            if step.index % 2:
                print(json.dumps({"snapshot_s": took, "memcpy_s": memcpy_s}), flush=True)


if __name__ == "__main__":
    main()
