"""Recipes of dense models for one accelerator and more."""

from __future__ import annotations

from holdfast.train.batches import BatchConfig
from holdfast.train.config import TrainConfig
from holdfast.train.data.config import DataConfig
from holdfast.train.model.config import ModelConfig
from holdfast.train.rates import RateConfig
from holdfast.train.settings import CheckpointConfig, EvaluationConfig


def dense_1b() -> TrainConfig:
    """956M parameters, 32,768 tokens a step, bfloat16 products: what the H200 figures in the docs are of.

    The embedded corpus shows that it runs; give it token files to learn from: `data.blend=blend.json`.
    """
    return TrainConfig(
        name="dense_1b",
        seq_len=2048,
        samples=9_437_184,
        model=ModelConfig(
            repeats=16,
            vocab_size=32_768,
            hidden=2048,
            num_heads=16,
            mlp_hidden=5632,
            tied=False,
        ),
        data=DataConfig(),
        batch=BatchConfig(schedule="16", lanes=8, micro=2),
        rate=RateConfig(peak=3e-4, floor=3e-5, warmup=32_000),
        checkpoint=CheckpointConfig(every=500),
        evaluation=EvaluationConfig(every=1000, samples=64),
    )
