"""How steps on a GPU are timed, the same for all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

PEAK = 989.5e12
"""Dense bf16 of an H100 or H200, without sparsity."""
GROUP = 5
"""Steps between two looks at the clock: a look at every step would make the GPU wait for the host."""


def timed(step: Callable[[], Callable[[], float]], flops: int, groups: int = 4) -> dict[str, Any]:
    """Time and MFU of a step. `step` queues one and returns what waits for its loss; one group warms up."""
    times, loss = [], float("nan")
    for _ in range(groups + 1):
        began = time.perf_counter()
        wait = [step() for _ in range(GROUP)][-1]
        loss = wait()
        times.append((time.perf_counter() - began) / GROUP)
    median = statistics.median(times[1:])
    return {
        "step_ms": median * 1e3,
        "mfu": flops / median / PEAK,
        "best_mfu": flops / min(times[1:]) / PEAK,
        "loss": loss,
    }
