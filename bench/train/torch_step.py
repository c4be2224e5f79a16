"""The same step in PyTorch with `torch.compile`: `python -m bench.train.torch_step`. Prints one JSON object.

fp32 parameters and AdamW (fused), bf16 autocast, flash or cuDNN attention as torch picks it, layers and loss
as in the recipe `dense_1b`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bench.train.timing import timed
from holdfast.recipes import dense_1b
from holdfast.train.flops import model_flops
from holdfast.train.model.config import ModelConfig


class Block(nn.Module):  # type: ignore[misc]
    """Attention and MLP with their norms."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, hidden, inner = config.num_heads, config.hidden, config.mlp_hidden
        self.norms = nn.ModuleList([nn.RMSNorm(hidden, eps=config.norm_eps) for _ in range(2)])
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        samples, length, hidden = x.shape
        qkv = self.qkv(self.norms[0](x)).view(samples, length, 3, self.heads, -1).transpose(1, 3)
        q, k, v = qkv.unbind(2)
        mixed = F.scaled_dot_product_attention(turned(q, cos, sin), turned(k, cos, sin), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, hidden))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def turned(x: Any, cos: Any, sin: Any) -> Any:
    """Rotary embedding of [samples, heads, sequence, head]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Model(nn.Module):  # type: ignore[misc]
    """The decoder of a config, with its loss."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.repeats)])
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        for weight in self.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Any, targets: Any, cos: Any, sin: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def main() -> None:
    config = dense_1b()
    size, length, device = config.batches.size_at(0), config.seq_len, "cuda"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Model(config.model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    dim = config.model.head_size
    rates = config.model.rope_theta ** (-torch.arange(0, dim, 2, device=device) / dim)
    angles = torch.arange(length, device=device)[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    text = torch.randint(config.model.vocab_size, (size, length + 1), device=device)
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    forward = torch.compile(model)

    def step() -> Callable[[], float]:
        with torch.autocast(device, torch.bfloat16):
            loss = forward(tokens, targets, cos, sin)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return lambda: float(loss.item())

    began = time.perf_counter()
    step()()
    compile_s = time.perf_counter() - began
    flops = model_flops(config.model, size, length).total
    print(json.dumps({**timed(step, flops), "compile_s": compile_s, "torch": torch.__version__}), flush=True)


if __name__ == "__main__":
    main()
