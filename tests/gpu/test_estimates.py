"""The closed forms of memory beside what XLA says on a GPU.

Needs a GPU: `HOLDFAST_REQUIRE_GPU=1 pytest -s tests/gpu/test_estimates.py`. Continuous integration has none.
"""

from __future__ import annotations

import jax
import pytest

from holdfast.recipes import resolve
from holdfast.train.compiler import findings

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "settings",
    [
        ("batch.lanes=0", "batch.micro=0", "model.repeats=4"),
        ("batch.micro=2", "model.repeats=4"),
        ("batch.lanes=0", "batch.micro=0", "model.repeats=4", "model.remat=full"),
        ("batch.lanes=0", "batch.micro=0", "model.repeats=4", "model.remat=none"),
        ("batch.lanes=0", "batch.micro=0", "model.repeats=4", "model.layers=scanned"),
    ],
    ids=",".join,
)
def test_bytes_are_near_what_xla_says(gpu: jax.Device, settings: tuple[str, ...]) -> None:
    for one in findings(resolve("recipes.dense_1b", settings)):
        print(f"{one.program}: bytes {one.xla_bytes:,} {one.bytes_error:+.1%}")
        assert one.flops_error is None
        assert abs(one.bytes_error) < 0.1
