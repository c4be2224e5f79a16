"""A training script of a replica of two workers, for `holdfast launch`: one of them goes wrong if told to.

    holdfast launch --workers-per-replica 2 tests/jax/world_script.py FOLDER [AT [HOW]]

It kills itself (HOW: kill), or does not come to the collective that the other one waits in, inside XLA: it
stays in its own step, in a compile, or in the save before that (step, compile, save).

At the end each worker writes the bits of its state, and whether its executable came out of a bundle.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

import holdfast
from holdfast import faults
from holdfast.xla import compiled
from tests.xla.programs import KEY, flat, placed

STEPS = 30


def go_wrong(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "save":
        faults.arm("trainer.save.begin:delay=600")
    elif how == "compile":
        jax.jit(lambda x: x + bool(threading.Event().wait()))(1)  # while it is traced
    else:
        threading.Event().wait()  # for ever


def main() -> None:
    folder = Path(sys.argv[1])
    fails_at = int(sys.argv[2]) if len(sys.argv) > 2 else -1
    how = sys.argv[3] if len(sys.argv) > 3 else "kill"
    with holdfast.join() as run:
        assert jax.process_count() == 2
        mesh = Mesh(np.array(jax.devices()), ("x",))
        fn, (first, batch) = placed(mesh)
        step_fn = compiled(fn, first, batch, folder=folder / "bundles", key=KEY, name="step")
        state: dict[str, Any] = run.restore(lambda: placed(mesh)[1][0])
        rows = NamedSharding(mesh, jax.sharding.PartitionSpec("x"))  # type: ignore[no-untyped-call]
        for step in run.steps(until=STEPS, save_every=10):
            failed = folder / "failed"
            if step.index == fails_at and run.index == 1 and not failed.exists():
                failed.touch()
                go_wrong(how)
            values = np.random.default_rng(step.index).standard_normal((16, 32), np.float32)
            batch = jax.make_array_from_callback(values.shape, rows, values.__getitem__)
            state, _ = step_fn(state, batch)
            jax.block_until_ready(state)  # type: ignore[no-untyped-call]
            step.done(state)
    (folder / f"bits-{run.index}").write_bytes(flat(state))
    (folder / f"source-{run.index}").write_text(step_fn.source)


if __name__ == "__main__":
    main()
