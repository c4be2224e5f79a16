"""Deterministic steps on a GPU repeat bit for bit.

Needs a GPU: `HOLDFAST_REQUIRE_GPU=1 pytest tests/gpu/test_exactness.py`. Continuous integration has none.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from holdfast.recipes import resolve
from holdfast.train.step import Steps

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("layers", ["unrolled", "scanned"])
def test_a_deterministic_step_repeats_bit_for_bit(gpu: jax.Device, layers: str) -> None:
    config = resolve("recipes.dense_1b", ["model.repeats=2", f"model.layers={layers}", "batch.micro=2"])
    assert config.deterministic
    steps = Steps(config, config.model.build(), config.mesh.build(), config.optimizer.build())
    text = np.random.default_rng(0).integers(0, 32_768, (2, config.seq_len + 1), dtype=np.int32)
    mask = np.ones((2, config.seq_len), np.float32)
    micro = steps.put({"tokens": text[:, :-1], "targets": text[:, 1:], "mask": mask}, 2)

    def bits() -> dict[str, bytes]:
        state: Any = steps.init(jax.random.key(0))
        for _ in range(3):
            state, _ = steps.fused(state, micro, np.float32(3e-4), np.float32(0.1))
        return {
            jax.tree_util.keystr(path): np.asarray(leaf).tobytes()
            for path, leaf in jax.tree_util.tree_leaves_with_path(state["params"])
        }

    first, again = bits(), bits()
    assert {name for name in first if first[name] != again[name]} == set()
