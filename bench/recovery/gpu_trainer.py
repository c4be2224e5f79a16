"""A replica on a GPU, which says when it came to what: `gpu_trainer.py STEPS`."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

BEGAN = time.time()

import jax  # noqa: E402
import numpy as np  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import holdfast  # noqa: E402
from bench.recovery import model  # noqa: E402


def said(what: str, **more: float) -> None:
    """One line of JSON, with the moment."""
    print(json.dumps({"at": time.time(), "what": what, **more}), flush=True)


def rehearse() -> None:
    """Start the device, then compile both programs or load them."""
    said("imported", began=BEGAN)
    jax.devices()
    jax.block_until_ready(jax.numpy.zeros(8))
    said("context")
    state = model.init()
    jax.block_until_ready(state)
    said("initialised")
    total = jax.tree.map(np.asarray, model.lane_grads(state, model.lane_batch(0, 0)))
    jax.block_until_ready(model.apply(state, total))
    said("rehearsed")


def main() -> None:
    with holdfast.join(rehearse=rehearse) as run:
        said("seated")
        state = run.restore(model.init)
        jax.block_until_ready(state)
        said("restored")
        for step in run.steps(until=int(sys.argv[1]), save_every=None):
            began = time.perf_counter()
            computed = 0.0
            for lane in step.lanes:
                start = time.perf_counter()
                grads = jax.block_until_ready(model.lane_grads(state, model.lane_batch(step.index, lane)))
                computed += time.perf_counter() - start
                step.add(lane, grads)
                del grads
            total = step.total()
            summed = time.perf_counter() - began
            state = jax.block_until_ready(model.apply(state, total))
            whole = time.perf_counter() - began
            said("step", index=step.index, compute_s=computed, exposed_s=summed - computed, whole_s=whole)
            step.done(state, {})


if __name__ == "__main__":
    main()
