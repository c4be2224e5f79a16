"""A tiny numpy trainer that mishaps befall. A lane's result depends on state, step and lane, to the last bit.

    trainer.py OUT --until N [--lane-s S] [--no-lanes] [--checkpoints PLACE] [--mirror PLACE]

Writes a line for each applied step to OUT/steps-<pid>, and OUT/final-<pid> when it is through.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

import holdfast
from tests.recovery.mishaps import Plan

SIZE: Final = 2000
SAMPLES: Final = 16
SAVE_EVERY: Final = 5
Tree = dict[str, npt.NDArray[np.float32]]


def init() -> Tree:
    weights = np.random.default_rng(7).standard_normal(SIZE).astype(np.float32)
    return {"w": weights, "m": np.zeros(SIZE, np.float32)}


def lane_grads(state: Tree, step: int, lane: int) -> Tree:
    noise = np.random.Generator(np.random.Philox(key=[step, lane])).standard_normal(SIZE, np.float32)
    return {"g": np.sin(state["w"] * noise) * np.float32(10.0 ** (lane - 4))}


def apply(state: Tree, total: Tree) -> Tree:
    """In place: whoever reads the state at the wrong moment gets wrong bits."""
    state["m"] *= np.float32(0.9)
    state["m"] += total["g"]
    state["w"] -= np.float32(0.01) * state["m"]
    return state


def digest(state: Tree) -> str:
    return hashlib.sha256(state["w"].tobytes() + state["m"].tobytes()).hexdigest()[:16]


def train(plan: Plan, options: argparse.Namespace) -> str:
    """Train to the end; the digest of the last state."""
    with (
        open(options.out / f"steps-{os.getpid()}", "w", buffering=1, encoding="ascii") as lines,
        holdfast.join(
            rehearse=lambda: plan.hit("rehearse"),
            samples_per_step=SAMPLES,
            checkpoints=options.checkpoints,
            mirror=options.mirror,
        ) as run,
    ):
        plan.slot = run.slot

        def begin() -> Tree:
            plan.hit("init")
            return init()

        state = run.restore(begin)
        for step in run.steps(until=options.until, save_every=SAVE_EVERY):
            plan.slot, plan.step = run.slot, step.index
            assert step.samples == SAMPLES * step.index
            if options.no_lanes:
                # One world: whoever is in it computes all of a step.
                plan.hit("lane")
                time.sleep(options.lane_s)
                total = lane_grads(state, step.index, 0)
            else:
                for lane in step.lanes:
                    plan.hit("lane")
                    time.sleep(options.lane_s)  # stands for the work of a lane
                    step.add(lane, lane_grads(state, step.index, lane))
                total = step.total()
            plan.hit("apply")
            state = apply(state, total)
            lines.write(f"{step.index} {run.slot} {run.generation} {digest(state)}\n")
            step.done(state)
        plan.hit("end")
    return digest(state)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--until", type=int, required=True)
    parser.add_argument("--lane-s", type=float, default=0.0)
    parser.add_argument("--no-lanes", action="store_true")
    parser.add_argument("--checkpoints")
    parser.add_argument("--mirror")
    options = parser.parse_args()
    plan = Plan(options.out)
    plan.hit("import")
    plan.install()
    final = train(plan, options)
    plan.hit("exit")
    (options.out / f"final-{os.getpid()}").write_text(final, encoding="ascii")


if __name__ == "__main__":
    main()
