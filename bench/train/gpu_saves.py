"""What a save every 20 steps costs on a GPU: `python -m bench.train.gpu_saves [SETTINGS]`.

The fused step of the recipe `dense_1b`, which takes its state over and changes it, in groups of 20 steps, in
turns without a save and with one at the beginning of the group. Prints one JSON object.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from typing import Any, Final

import jax
import numpy as np

import holdfast
from bench.train.gpu_step import random_batch
from holdfast.recipes import dense_1b
from holdfast.train import TrainConfig
from holdfast.train.step import Steps

EVERY: Final = 20
PAIRS: Final = 4
_DEADLINE_S: Final = 120.0


def measured(config: TrainConfig, folder: str, pairs: int = PAIRS) -> dict[str, Any]:
    """Seconds of groups of steps without and with a save."""
    steps = Steps(config, config.model.build(), config.mesh.build(), config.optimizer.build())
    size = config.batches.size_at(0)
    state = steps.init(jax.random.key(config.seed))
    micro = steps.put(random_batch(config, size), size)
    compiled = steps.fused.lower(*steps.examples(size)["fused"]).compile()
    calls, saved = [], []

    def group(ckpt: holdfast.Checkpointer | None, number: int) -> float:
        nonlocal state
        metrics: dict[str, Any] = {}
        began = time.perf_counter()
        for step in range(EVERY):
            if ckpt is not None and not step:
                called = time.perf_counter()
                saved.append(ckpt.save(number, state))
                calls.append(time.perf_counter() - called)
            state, metrics = compiled(state, micro, np.float32(3e-4), np.float32(0.1))
        float(metrics["loss"])
        return time.perf_counter() - began

    with holdfast.Checkpointer(folder, keep=1) as ckpt:
        ckpt.prepare(state)
        group(None, 0)
        plain, saving = [], []
        for number in range(1, pairs + 1):
            plain.append(group(None, number))
            saving.append(group(ckpt, number))
            saved[-1].durable(_DEADLINE_S)
    return {
        "plain_s": plain,
        "saving_s": saving,
        "call_s": calls,
        "cost": statistics.median(saving) / statistics.median(plain) - 1.0,
        "nbytes": sum(x.nbytes for x in jax.tree.leaves(state) if hasattr(x, "nbytes")),
    }


def main() -> None:
    settings = sys.argv[1].split(",") if len(sys.argv) > 1 else []
    with tempfile.TemporaryDirectory(prefix="holdfast-saves-") as folder:
        try:
            result = measured(dense_1b().override(settings), folder)
        except Exception as error:  # the other measurements go on
            result = {"error": f"{type(error).__name__}: {error}"[:500]}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
