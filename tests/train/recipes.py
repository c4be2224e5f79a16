"""The recipes for a laptop, made small enough to run from end to end many times."""

from __future__ import annotations

from typing import Final

from holdfast.recipes import resolve
from holdfast.train.config import TrainConfig

SMALLER: Final = (
    "seq_len=16",
    "model.hidden=16",
    "model.mlp_hidden=32",
    "model.repeats=1",
    "evaluation.every=4",
    "evaluation.samples=8",
    "checkpoint.every=3",
    "rate.peak=2e-2",
    "rate.warmup=16",
    "rate.wd_ramp=0",
)
SETTINGS: Final = {
    "tiny": ("samples=48", "batch.schedule=8", "batch.lanes=4", "batch.micro=1"),
    "small": ("samples=56", "batch.schedule=0:4 16:8", "batch.lanes=4", "batch.micro=1", "rate.wsd_decay=16"),
    "one_world": ("samples=48", "batch.schedule=8"),
    "dense_1b": (
        "samples=48",
        "batch.schedule=8",
        "batch.lanes=4",
        "batch.micro=1",
        "model.num_heads=4",
        "model.vocab_size=320",
    ),
}


def recipe(name: str, *more: str) -> TrainConfig:
    """A recipe of the house, smaller."""
    return resolve(f"recipes.{name}", (*SMALLER, *SETTINGS[name], *more))
