"""What the engine costs beside the step itself: CPU time of this process for a step, less that of a bare one.

The model is so small that the device's part is next to nothing. The bare step is the same compiled program,
called in a loop with one batch that lies ready. CPU time counts all threads, also XLA's, on both sides.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

import jax
import numpy as np

from bench.report import Series
from holdfast.train.batches import BatchConfig
from holdfast.train.config import TrainConfig
from holdfast.train.data import DataConfig
from holdfast.train.model.config import ModelConfig
from holdfast.train.program import run_training
from holdfast.train.rates import RateConfig
from holdfast.train.settings import CheckpointConfig, LogConfig
from holdfast.train.state import RunOptions
from holdfast.train.step import Steps

STEPS: Final = 400
WARM: Final = 100
_BATCH: Final = 4


@final
class Clock:
    """A tracker that looks at the clock."""

    def __init__(self) -> None:
        self.at: dict[int, float] = {}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.at[step] = time.process_time()

    def close(self) -> None:
        clocks.append(self)


clocks: list[Clock] = []


def clock() -> Clock:
    """For `log.trackers`."""
    return Clock()


def config(*, lanes: int, steps: int = STEPS) -> TrainConfig:
    """A run whose steps cost next to nothing."""
    return TrainConfig(
        name="overhead",
        seq_len=16,
        samples=_BATCH * steps,
        model=ModelConfig(
            repeats=1, vocab_size=320, hidden=16, num_heads=2, mlp_hidden=32, compute_dtype="float32"
        ),
        data=DataConfig(),
        batch=BatchConfig(schedule=str(_BATCH), lanes=lanes, micro=1 if lanes else 0),
        rate=RateConfig(peak=1e-3),
        checkpoint=CheckpointConfig(every=0),
        log=LogConfig(every=10**6, trackers=(f"{__name__}:clock",)),
    )


def bare_ms(steps: int = STEPS) -> float:
    """CPU milliseconds of one call of the compiled step."""
    made = config(lanes=0)
    stream = made.data.build(seq_len=made.seq_len, seed=0)
    programs = Steps(
        made, made.model.build(), made.mesh.build(), made.optimizer.build(), separate=stream.separate
    )
    batch: Mapping[str, Any] = stream.batch(0, _BATCH)
    micro = {key: batch[key] for key in programs.keys}
    state = programs.init(jax.random.key(0))
    step = programs.fused.lower(*programs.examples(_BATCH)["fused"]).compile()
    rate, began = np.float32(1e-3), 0.0
    metrics: Any = None
    for number in range(steps):
        if number == WARM:
            jax.block_until_ready(metrics)  # type: ignore[no-untyped-call]
            began = time.process_time()
        state, metrics = step(state, micro, rate, rate)
    jax.block_until_ready((state, metrics))  # type: ignore[no-untyped-call]
    stream.close()
    return (time.process_time() - began) / (steps - WARM) * 1e3


def engine_ms(*, lanes: int, steps: int = STEPS) -> float:
    """CPU milliseconds of one step of the whole engine: data, ledger, metrics, log, supervision."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        run_training(config(lanes=lanes, steps=steps), RunOptions(folder=str(Path(folder)), progress=False))
    at = clocks.pop().at
    return (at[steps - 1] - at[WARM]) / (steps - 1 - WARM) * 1e3


def measured(rounds: int, *, smoke: bool = False) -> tuple[float, Series, Series]:
    """What the engine adds to a bare step, in CPU milliseconds: the median of pairs, and both sides."""
    steps = WARM + 20 if smoke else STEPS
    engine, bare = [], []
    for _ in range(rounds):
        bare.append(bare_ms(steps))
        engine.append(engine_ms(lanes=0, steps=steps))
    added = statistics.median(a - b for a, b in zip(engine, bare, strict=True))
    return added, Series(tuple(engine), "ms"), Series(tuple(bare), "ms")
