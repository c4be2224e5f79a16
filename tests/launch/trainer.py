"""A tiny model in plain numpy: trains under `holdfast launch` or alone, and says a digest of its last state.

trainer.py UNTIL [SECONDS_PER_LANE [FAULT]]

FAULT happens once in the run, to the worker in slot 1 at its seventh step. From the step in the variable
TRAINER_BRAKE on lanes are slow, until there is a file `go` in the run's folder: whatever a test does
meanwhile comes long before the end.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from holdfast.supervise import join

Tree = dict[str, npt.NDArray[np.float32]]


def init() -> Tree:
    return {"w": np.zeros(1000, np.float32), "m": np.zeros(1000, np.float32)}


def lane_grads(state: Tree, step: int, lane: int) -> Tree:
    noise = np.random.Generator(np.random.Philox(key=[step, lane])).standard_normal(1000, np.float32)
    return {"g": (state["w"] - noise) * np.float32(0.1)}


def apply(state: Tree, total: Tree) -> Tree:
    m = np.float32(0.9) * state["m"] + total["g"]
    return {"w": state["w"] - np.float32(0.01) * m, "m": m}


def lock_interpreter() -> None:
    while True:
        ctypes.PyDLL(None).sleep(600)  # with the interpreter's lock held; signals wake it up


def spin() -> None:
    while True:
        pass


def fail() -> None:
    raise RuntimeError("the loss is not a number")


FAULTS: dict[str, Callable[[], object]] = {
    "gil": lock_interpreter,
    "spin": spin,
    "raise": fail,
    "exit": lambda: sys.exit(75),
}


def suffer(fault: str, folder: Path) -> None:
    """Let the fault happen, unless it has."""
    try:
        (folder / "suffered").touch(exist_ok=False)
    except FileExistsError:
        return
    FAULTS[fault]()


BRAKE = int(os.environ.get("TRAINER_BRAKE", sys.maxsize))
BRAKED_S = 0.2


def work(step: int, lane_s: float, folder: Path) -> None:
    """Stands for the work of a lane."""
    time.sleep(BRAKED_S if step >= BRAKE and not (folder / "go").exists() else lane_s)


def main() -> None:
    until, lane_s = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    fault = sys.argv[3] if len(sys.argv) > 3 else ""
    with join() as run:
        state = run.restore(init)
        print(f"slot {run.slot} of {run.size}", flush=True)
        for step in run.steps(until=until, save_every=10):
            for lane in step.lanes:
                work(step.index, lane_s, run.folder)
                if fault and run.slot == 1 and step.index == 6:
                    suffer(fault, run.folder)
                step.add(lane, lane_grads(state, step.index, lane))
            state = apply(state, step.total())
            step.done(state)
    print(f"final {hashlib.sha256(state['w'].tobytes() + state['m'].tobytes()).hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
