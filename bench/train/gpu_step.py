"""Steps of the engine on a GPU, one setting after the other: `python -m bench.train.gpu_step VARIANT ...`.

A variant is `base`, or settings of the recipe `dense_1b`: `model.remat=none,model.layers=scanned`. Prints one
JSON object for each.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from bench.train.timing import timed
from holdfast.recipes import dense_1b
from holdfast.train import TrainConfig
from holdfast.train.flops import model_flops
from holdfast.train.step import Steps


def measured(config: TrainConfig) -> dict[str, Any]:
    """Times of the fused step of a config on the device that is here."""
    steps = Steps(config, config.model.build(), config.mesh.build(), config.optimizer.build())
    size = config.batches.size_at(0)
    state = steps.init(jax.random.key(config.seed))
    micro = steps.put(random_batch(config, size), size)
    rate, decay = np.float32(3e-4), np.float32(0.1)
    began = time.perf_counter()
    compiled = steps.fused.lower(*steps.examples(size)["fused"]).compile()
    compile_s = time.perf_counter() - began

    def step() -> Callable[[], float]:
        nonlocal state
        state, metrics = compiled(state, micro, rate, decay)
        return lambda: float(metrics["loss"])

    memory = compiled.memory_analysis()
    return {
        **timed(step, model_flops(config.model, size, config.seq_len).total),
        "compile_s": compile_s,
        "temporary_gb": memory.temp_size_in_bytes / 1e9 if memory else None,
    }


def random_batch(config: TrainConfig, size: int) -> dict[str, np.ndarray[Any, Any]]:
    """Tokens without meaning: the time of a step does not depend on them."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, config.model.vocab_size, (size, config.seq_len + 1), dtype=np.int32)
    mask = np.ones((size, config.seq_len), np.float32)
    return {"tokens": text[:, :-1], "targets": text[:, 1:], "mask": mask}


def main() -> None:
    for variant in sys.argv[1:]:
        settings = [] if variant == "base" else variant.split(",")
        try:
            result = measured(dense_1b().override(settings))
        except Exception as error:  # one setting that does not fit must not lose the others
            result = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps({"variant": variant, **result}), flush=True)


if __name__ == "__main__":
    main()
