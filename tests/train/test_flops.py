"""Operation counts agree with those that others publish for well-known models."""

from __future__ import annotations

import pytest

from holdfast.train.flops import model_flops
from holdfast.train.model.config import ModelConfig


def llama(layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocab: int) -> ModelConfig:
    return ModelConfig(
        repeats=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        mlp_hidden=mlp,
        vocab_size=vocab,
        tied=False,
    )


@pytest.mark.parametrize(
    ("model", "seq_len", "giga"),
    [
        (llama(32, 4096, 32, 32, 11008, 32000), 4096, 42.86),
        (llama(32, 4096, 32, 8, 14336, 128256), 8192, 51.47),
        (llama(80, 8192, 64, 8, 28672, 128256), 8192, 449.2),
        (llama(126, 16384, 128, 8, 53248, 128256), 8192, 2524),
    ],
    ids=["llama2-7b", "llama3-8b", "llama3-70b", "llama3-405b"],
)
def test_published_models(model: ModelConfig, seq_len: int, giga: float) -> None:
    assert model_flops(model, 1, seq_len).total / seq_len == pytest.approx(giga * 1e9, rel=1e-3)


def test_parts_add_up_and_grow_as_they_should() -> None:
    model = llama(4, 64, 4, 2, 256, 512)
    once, twice, longer = (model_flops(model, *at) for at in ((1, 128), (2, 128), (1, 256)))
    assert twice.total == 2 * once.total
    assert longer.attention == 4 * once.attention
    assert longer.mlp == 2 * once.mlp
    assert once.total == once.projections + once.attention + once.mlp + once.head
