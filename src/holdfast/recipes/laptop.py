"""Recipes for two CPU cores: the embedded corpus, byte by byte, until the loss has clearly fallen."""

from __future__ import annotations

from dataclasses import replace

from holdfast.train.batches import BatchConfig
from holdfast.train.config import TrainConfig
from holdfast.train.data.config import DataConfig
from holdfast.train.model.config import ModelConfig
from holdfast.train.rates import RateConfig
from holdfast.train.settings import CheckpointConfig, EvaluationConfig, LogConfig

_BYTES = 320
"""256 bytes, the end of a document, and room to a multiple of 64, which every tensor axis divides."""


def tiny() -> TrainConfig:
    """About 0.2M parameters in the shape of a Llama: the loss halves within two minutes on two cores."""
    return TrainConfig(
        name="tiny",
        seq_len=128,
        samples=9600,
        model=ModelConfig(
            repeats=4,
            vocab_size=_BYTES,
            hidden=64,
            num_heads=4,
            mlp_hidden=192,
            # CPUs compute in float32 faster than in bfloat16.
            compute_dtype="float32",
        ),
        data=DataConfig(),
        batch=BatchConfig(schedule="32", lanes=8, micro=4),
        rate=RateConfig(peak=3e-3, floor=3e-4, warmup=640),
        checkpoint=CheckpointConfig(every=100),
        evaluation=EvaluationConfig(every=100, samples=32),
        log=LogConfig(every=10),
    )


def small() -> TrainConfig:
    """As `tiny`, with grouped keys and values, an output projection of its own, and a batch that grows."""
    base = tiny()
    return replace(
        base,
        name="small",
        samples=6400,
        model=replace(base.model, num_kv_heads=2, tied=False, qk_norm=True),
        batch=BatchConfig(schedule="0:16 2K:32", unit="samples", lanes=8, micro=2),
        rate=RateConfig(peak=3e-3, floor=3e-5, warmup=640, shape="wsd", wsd_decay=1600),
    )


def one_world() -> TrainConfig:
    """As `tiny`, without lanes: one program over all devices of the mesh, in which XLA sums."""
    base = tiny()
    return replace(base, name="one_world", batch=BatchConfig(schedule="32", lanes=0, micro=0))
