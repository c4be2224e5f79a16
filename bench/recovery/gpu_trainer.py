"""A replica on a GPU, which says when it came to what: `gpu_trainer.py STEPS`."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

BEGAN = time.time()

import jax  # noqa: E402
import numpy as np  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import holdfast  # noqa: E402
from bench.recovery import model  # noqa: E402
from holdfast.xla import compiled  # noqa: E402


def said(what: str, **more: float) -> None:
    """One line of JSON, with the moment."""
    print(json.dumps({"at": time.time(), "what": what, **more}), flush=True)


def rehearse() -> None:
    """Start the device. A bundle is opened with the run's key, which there is after `join`."""
    said("imported", began=BEGAN)
    jax.devices()
    jax.block_until_ready(jax.numpy.zeros(8))
    said("context")


def programs(run: Any, state: Any) -> tuple[Any, Any]:
    """Both programs, out of the run's folder or compiled."""
    batch = jax.ShapeDtypeStruct(model.lane_batch(0, 0).shape, np.int32)
    total = jax.eval_shape(model.lane_grads, state, batch)
    found = [
        compiled(fn, *args, folder=run.folder / "bundles", key=run.key, name=name)
        for name, fn, args in (
            ("lane_grads", model.lane_grads, (state, batch)),
            ("apply", model.apply, (state, total)),
        )
    ]
    said("programs", loaded=sum(one.source == "bundle" for one in found))
    return found[0], found[1]


def main() -> None:
    with holdfast.join(rehearse=rehearse) as run:
        said("seated")
        into = model.described(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
        lane_grads, apply = programs(run, into)
        state = run.restore(model.init, into=into)
        jax.block_until_ready(state)
        said("restored")
        for step in run.steps(until=int(sys.argv[1]), save_every=None):
            began = time.perf_counter()
            computed = added = 0.0
            for lane in step.lanes:
                start = time.perf_counter()
                grads = jax.block_until_ready(lane_grads(state, model.lane_batch(step.index, lane)))
                computed += time.perf_counter() - start
                start = time.perf_counter()
                step.add(lane, grads)
                added += time.perf_counter() - start
                del grads
            total = step.total()
            summed = time.perf_counter() - began
            state = jax.block_until_ready(apply(state, total))
            whole = time.perf_counter() - began
            times = {"compute_s": computed, "add_s": added, "exposed_s": summed - computed, "whole_s": whole}
            said("step", index=step.index, **times)
            step.done(state, {})


if __name__ == "__main__":
    main()
