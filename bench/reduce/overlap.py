"""Folding beside the caller: lanes of arrays on a device, and a computation that takes as long as they do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from bench.report import Series

LANES: Final = 4
FLOATS: Final = 16 << 20
"""64 MiB in each lane."""
_TOGETHER: Final = f"{LANES} lanes of 64 MiB, each computed for as long as it is folded"


def measure(rounds: int, *, smoke: bool, progress: Callable[[str], None]) -> dict[str, Series]:
    """Milliseconds of a step of one member, in the call and beside it, and their ratio pair by pair.

    The computation is a wait, like that for an accelerator: it takes no core. Needs jax.
    """
    import jax.numpy as jnp

    from holdfast.reduce import Reducer
    from holdfast.reduce.intake import INLINE_BYTES

    progress(_TOGETHER)
    floats = INLINE_BYTES // 4 if smoke else FLOATS
    trees = [jnp.full(floats, 1.0 + lane, jnp.float32).block_until_ready() for lane in range(LANES)]
    took: dict[str, list[float]] = {"in the call": [], "beside": []}
    with_calls, beside = Reducer(num_lanes=LANES, inline_bytes=1 << 60), Reducer(num_lanes=LANES)
    try:
        warm = [_step(one, trees, 0.0, step) for step in range(3) for one in (with_calls, beside)]
        for number in range(rounds):
            step = 3 + 2 * number
            wait_s = min(warm[-2:]) if smoke else _step(with_calls, trees, 0.0, step) / LANES
            took["in the call"].append(_step(with_calls, trees, wait_s, step + 1))
            took["beside"].append(_step(beside, trees, wait_s, step + 1))
        expected = LANES * (LANES + 1) / 2
        for one in (with_calls, beside):
            if float(one.total()[-1]) != expected:
                raise RuntimeError(f"a wrong sum: {one.total()[-1]} instead of {expected}")
    finally:
        with_calls.close()
        beside.close()
    found = {
        f"{_TOGETHER}, {name}": Series(tuple(1e3 * one for one in seconds), unit="ms")
        for name, seconds in took.items()
    }
    ratios = [mine / other for mine, other in zip(took["beside"], took["in the call"], strict=True)]
    return {**found, "beside / in the call": Series(tuple(ratios), unit="×")}


def _step(reducer: Any, trees: list[Any], wait_s: float, step: int) -> float:
    """Seconds of a step in which every lane is computed for `wait_s`."""
    computing = threading.Event()
    started = time.perf_counter()
    reducer.begin(step, {0: range(LANES)})
    for lane, tree in enumerate(trees):
        computing.wait(wait_s)
        reducer.add(lane, tree)
    reducer.exchange(60.0, lambda: None)
    return time.perf_counter() - started
