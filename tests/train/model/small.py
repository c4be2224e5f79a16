"""Models and batches that are worked through in a moment."""

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.train.model.config import ModelConfig

Numpy = np.ndarray[Any, np.dtype[Any]]


def small(**changes: Any) -> ModelConfig:
    """Two blocks of width 32 with grouped keys and values, in float32."""
    settings: dict[str, Any] = {
        "pattern": "*-",
        "repeats": 1,
        "vocab_size": 48,
        "hidden": 32,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 4,
        "mlp_hidden": 40,
        "init_std": 0.2,
        "compute_dtype": "float32",
    }
    return ModelConfig(**{**settings, **changes})


def batch(samples: int = 2, length: int = 8, vocab: int = 48, seed: int = 0) -> dict[str, Any]:
    """Tokens of two documents in each sample; some are masked."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, vocab, (samples, length + 1), dtype=np.int32)
    cut = length // 3
    place = np.arange(length, dtype=np.int32)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "mask": (random.random((samples, length)) < 0.8).astype(np.float32),
        "segments": np.tile((place >= cut).astype(np.int32), (samples, 1)),
        "positions": np.tile(np.where(place < cut, place, place - cut).astype(np.int32), (samples, 1)),
    }
