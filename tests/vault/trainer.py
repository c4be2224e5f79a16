"""A trainer with a standing vault, as a process of its own; reports what it sees in JSON lines.

    python -m tests.vault.trainer ROOT VAULT [--first 1] [--steps 3] [--slots 2]

The state of a step is a pure function of its number. After its saves it waits for a line.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np

from holdfast.checkpoint import Checkpointer
from holdfast.vault import client
from tests.checkpoint.trainer import await_line, report

TOKEN = b"a token of the run, for tests"
RUN = "demo"
SIZE = 20 << 20


def state(step: int, size: int = SIZE) -> dict[str, Any]:
    """What a trainer holds after `step`."""
    base = np.arange(size // 4, dtype=np.uint32)
    return {"w": base * np.uint32(2654435761) + np.uint32(step), "b": np.full(3, step, np.float32), "n": step}


def is_step(tree: dict[str, Any], step: int, size: int = SIZE) -> bool:
    """Whether a restored tree is the state of `step`, to the bit."""
    want = state(step, size)
    return tree["n"] == step and all(np.array_equal(tree[key], want[key]) for key in ("w", "b"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("vault")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--size", type=int, default=SIZE)
    parser.add_argument("--until", choices=("staged", "durable"), default="durable")
    parser.add_argument("--ask", action="store_true", help="wait for a line before each save")
    options = parser.parse_args()
    # How soon a test starts another vault is not its question.
    client.REATTACH_S = 60.0  # type: ignore[attr-defined]
    ckpt = Checkpointer(
        options.root,
        writer=options.vault,
        slots=options.slots,
        serve="127.0.0.1:0",
        run=RUN,
        token=TOKEN,
        keep=None,
        rank=0,
        world=1,
    )
    report("ready")
    for step in range(options.first, options.first + options.steps):
        if options.ask:
            sys.stdin.readline()
        handle = ckpt.save(step, state(step, options.size))
        report("captured", step=step)
        handle.staged(60.0)
        report("staged", step=step)
        if options.until == "durable":
            handle.durable(60.0)
            report("durable", step=step)
    report("waiting")
    await_line()
    ckpt.close()
    report("closed")


if __name__ == "__main__":
    main()
