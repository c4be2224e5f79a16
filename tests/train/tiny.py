"""Configs that train in a moment."""

from __future__ import annotations

from holdfast.train.batches import BatchConfig
from holdfast.train.config import TrainConfig
from holdfast.train.data import DataConfig
from holdfast.train.model.config import ModelConfig
from holdfast.train.rates import RateConfig
from holdfast.train.settings import CheckpointConfig, LogConfig


def tiny(*overrides: str) -> TrainConfig:
    """A run of eight steps over the embedded corpus."""
    config = TrainConfig(
        name="tiny",
        seq_len=16,
        samples=64,
        # As the recipe `tiny` of tests/train/recipes.py has it: what is compiled for one serves both.
        model=ModelConfig(
            repeats=1, vocab_size=320, hidden=16, num_heads=4, mlp_hidden=32, compute_dtype="float32"
        ),
        data=DataConfig(),
        batch=BatchConfig(schedule="8", lanes=4, micro=1),
        rate=RateConfig(peak=1e-2, warmup=16),
        checkpoint=CheckpointConfig(every=3),
        log=LogConfig(every=4),
    )
    return config.override(overrides)
