"""Holdfast's trainer of the recovery benchmarks: `holdfast launch ... bench/recovery/trainer.py STEPS`."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import holdfast
from bench.recovery import model


def rehearse() -> None:
    """Compile both programs."""
    state = model.init()
    total = jax.tree.map(np.asarray, model.lane_grads(state, model.lane_batch(0, 0)))
    jax.block_until_ready(model.apply(state, total))


def note_threads(folder: Path) -> None:
    """Leave a note of which threads are Holdfast's, so that their CPU time can be seen from outside."""
    ours = [one.native_id for one in threading.enumerate() if one.name.startswith("holdfast")]
    Path(folder, f"threads-{os.getpid()}").write_text(json.dumps(ours))


def main() -> None:
    with holdfast.join(rehearse=rehearse) as run:
        state = run.restore(model.init)
        first = True
        for step in run.steps(until=int(sys.argv[1]), save_every=int(sys.argv[2])):
            for lane in step.lanes:
                step.add(lane, model.lane_grads(state, model.lane_batch(step.index, lane)))
            total = step.total()
            state = model.apply(state, total)
            if first:
                note_threads(run.folder)
                first = False
            step.done(state, {"loss": float(total["loss"]) / (model.ROWS * model.LENGTH)})
        hasher = xxhash.xxh3_128()
        for leaf in jax.tree.leaves(state):
            hasher.update(jax.device_get(leaf).tobytes())
        if run.slot == 0:
            Path(run.folder, "digest").write_text(hasher.hexdigest())


if __name__ == "__main__":
    main()
