"""The programs of a step: what their sums are made in."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from holdfast.train.step import Steps
from tests.train.tiny import tiny


def test_gradients_that_match_are_added_in_float32_and_others_in_their_own_dtype() -> None:
    config = tiny(
        "model.param_dtype=bfloat16", "model.compute_dtype=bfloat16", "optimizer.fp32_accumulation=**/up"
    )
    steps = Steps(config, config.model.build(), config.mesh.build(), config.optimizer.build())
    params = steps.init(jax.random.key(0))["params"]
    micros = [steps.put(batch(seed), 2) for seed in (1, 2)]
    parts = [steps.first(params, micro)["grads"]["layers"]["1"] for micro in micros]
    sums = steps.more(steps.first(params, micros[0]), params, micros[1])["grads"]["layers"]["1"]
    one, other = (np.asarray(part["up"], np.float32) for part in parts)
    assert sums["up"].dtype == jnp.float32
    assert (np.asarray(sums["up"]) == one + other).all()
    # Were they added in bfloat16, most would be others: this is what the setting is for.
    assert (np.asarray(sums["up"]) != np.asarray(sums["up"].astype(jnp.bfloat16), np.float32)).mean() > 0.5
    assert sums["gate"].dtype == jnp.bfloat16
    assert (np.asarray(sums["gate"]) == np.asarray(parts[0]["gate"] + parts[1]["gate"])).all()


def batch(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    text = np.random.default_rng(seed).integers(0, 320, (2, 17), dtype=np.int32)
    return {"tokens": text[:, :-1], "targets": text[:, 1:], "mask": np.ones((2, 16), np.float32)}


def test_a_process_reads_the_rows_of_its_devices() -> None:
    # One process has all devices here: on every mesh it reads every sample, and once.
    for mesh in ("mesh.data=2", "mesh.fsdp=4", "mesh.tensor=2"):
        config = tiny(mesh, "batch.lanes=0", "batch.micro=0")
        steps = Steps(config, config.model.build(), config.mesh.build(), config.optimizer.build())
        assert steps.local_rows(8) == slice(0, 8)
