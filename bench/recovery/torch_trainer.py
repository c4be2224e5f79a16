"""The peer under torchrun: the same model in PyTorch, gradients over gloo, rank 0 saves every step to memory.

    torchrun --nproc-per-node 3 --max-restarts 100 bench/recovery/torch_trainer.py FOLDER STEPS

Every completed step of rank 0 is one line "STEP MONOTONIC_SECONDS PIDS" in FOLDER/steps.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

VOCAB, WIDTH, LAYERS, HEADS, LENGTH, ROWS = 256, 192, 2, 4, 64, 12


class Layer(nn.Module):  # type: ignore[misc]
    """Attention and a feed-forward part, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.norm1 = nn.RMSNorm(WIDTH)
        self.norm2 = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (a.reshape(shape).transpose(1, 2) for a in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        down: Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + down


class Model(nn.Module):  # type: ignore[misc]
    """The benchmark's model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) / 8)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        return x @ self.embed.weight.T


def _batch(step: int, rank: int, world: int) -> Tensor:
    made = [
        np.random.Generator(np.random.Philox(key=[step, row])).integers(0, VOCAB, LENGTH + 1)
        for row in range(rank, ROWS, world)
    ]
    return torch.from_numpy(np.stack(made))


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    saved, first = folder / "state.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    for step in range(first, steps):
        tokens = _batch(step, rank, world)
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        flat = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        dist.all_reduce(flat)
        at = 0
        for p in model.parameters():
            p.grad = (flat[at : at + p.numel()] / world).reshape(p.shape)
            at += p.numel()
        optimizer.step()
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, folder / "new.pt")
            (folder / "new.pt").rename(saved)
            with open(folder / "steps", "a") as file:
                file.write(f"{step} {time.clock_gettime(time.CLOCK_MONOTONIC)}\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
