"""A tiny numpy trainer for the tests: every lane's result depends on state, step and lane, to the last bit.

    trainer.py OUT --until N [--lane-s S] [--in-place] [--save-every N] [--hold N ...]

In step N of `--hold` it stays until there is a file OUT/go-N. While it has fewer members than that file says,
it stays until it has heard of newcomers.

Writes OUT/<pid>.json when it is through, and a line for each step to OUT/steps-<pid>.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

import holdfast
from holdfast.supervise.members import GenerationOver
from holdfast.supervise.run import Run

SIZE = 1000


def init() -> dict[str, Any]:
    rng = np.random.default_rng(7)
    return {"w": rng.standard_normal(SIZE).astype(np.float32), "m": np.zeros(SIZE, np.float32)}


def lane_grads(state: dict[str, Any], step: int, lane: int) -> dict[str, Any]:
    rng = np.random.Generator(np.random.Philox(key=[step, lane]))
    noise = rng.standard_normal(SIZE).astype(np.float32)
    return {"g": np.sin(state["w"] * noise) * np.float32(10.0 ** (lane - 4)), "loss": np.float64(noise.sum())}


def apply(state: dict[str, Any], total: dict[str, Any], in_place: bool) -> dict[str, Any]:
    if in_place:
        state["m"] *= np.float32(0.9)
        state["m"] += total["g"]
        state["w"] -= np.float32(0.01) * state["m"]
        return state
    m = state["m"] * np.float32(0.9) + total["g"]
    return {"w": state["w"] - np.float32(0.01) * m, "m": m}


def digest(state: dict[str, Any]) -> str:
    return hashlib.sha256(state["w"].tobytes() + state["m"].tobytes()).hexdigest()


def hold(path: Path, run: Run) -> None:
    """Stay until the test lets everybody go on."""
    ends = time.monotonic() + 60.0
    while not path.exists() or not (run.size >= int(path.read_text()) or called(run)):
        assert time.monotonic() < ends, f"nobody made {path}, or nobody came"
        time.sleep(0.002)


def called(run: Run) -> bool:
    """Whether an exchange would let newcomers in: they call all others, which may hear it a while later."""
    members = run._parts.members
    assert members is not None
    try:
        members.check()
    except GenerationOver:
        return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--until", type=int, required=True)
    parser.add_argument("--lane-s", type=float, default=0.0)
    parser.add_argument("--in-place", action="store_true")
    parser.add_argument("--no-lanes", action="store_true")
    parser.add_argument("--save-every", type=int, default=None)
    parser.add_argument("--hold", type=int, nargs="*", default=())
    options = parser.parse_args()
    with holdfast.join(samples_per_step=16) as run:
        state = run.restore(init)
        with open(options.out / f"steps-{os.getpid()}", "w", buffering=1, encoding="ascii") as lines:
            for step in run.steps(until=options.until, save_every=options.save_every):
                assert step.samples == 16 * step.index
                if step.index in options.hold:
                    (options.out / f"held-{step.index}-{os.getpid()}").touch()
                    hold(options.out / f"go-{step.index}", run)
                if options.no_lanes:
                    state = apply(state, lane_grads(state, step.index, 0), options.in_place)
                else:
                    for lane in step.lanes:
                        # Stands for the work of a lane.
                        time.sleep(options.lane_s)
                        step.add(lane, lane_grads(state, step.index, lane))
                    state = apply(state, step.total(), options.in_place)
                step.done(state, {"norm": float(np.abs(state["w"]).sum())})
                lines.write(f"{step.index} {run.size} {run.generation} {digest(state)}\n")
        result = {"digest": digest(state), "slot": run.slot, "size": run.size, "generation": run.generation}
    (options.out / f"{os.getpid()}.json").write_text(json.dumps(result), encoding="ascii")


if __name__ == "__main__":
    main()
