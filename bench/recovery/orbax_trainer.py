"""The peer that restarts all: one JAX world over gloo and Orbax, whose parent starts everything again.

    python bench/recovery/orbax_trainer.py FOLDER STEPS RANK WORLD PORT

Every completed step of rank 0 is one line "STEP MONOTONIC_SECONDS" in FOLDER/steps. Every step is
saved, without waiting for it.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.recovery import model


def main() -> None:
    folder, steps = Path(sys.argv[1]).resolve(), int(sys.argv[2])
    rank, world, port = (int(word) for word in sys.argv[3:6])
    jax.config.update("jax_compilation_cache_dir", str(folder / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", world, rank)
    import orbax.checkpoint as ocp

    (folder / f"pid{rank}").write_text(str(os.getpid()))
    mesh = Mesh(np.array(jax.devices()), ("data",))
    everywhere, rowwise = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    @jax.jit
    def step_of(state: Any, tokens: jax.Array) -> Any:
        return model.apply(state, model.lane_grads(state, tokens))

    state = jax.device_put(model.init(), everywhere)
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=1)
    with ocp.CheckpointManager(folder / "orbax", options=options) as manager:
        newest = manager.latest_step()
        if newest is not None:
            state = manager.restore(newest, args=ocp.args.StandardRestore(state))
        for step in range(0 if newest is None else newest + 1, steps):
            share = model.ROWS // world
            local = model.rows(step, rank * share, share)
            tokens = jax.make_array_from_process_local_data(rowwise, local)
            state = step_of(state, tokens)
            jax.block_until_ready(state)
            if rank == 0:
                with open(folder / "steps", "a") as file:
                    file.write(f"{step} {time.clock_gettime(time.CLOCK_MONOTONIC)}\n")
            manager.save(step, args=ocp.args.StandardSave(state))


if __name__ == "__main__":
    main()
