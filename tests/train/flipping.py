"""A worker of a run in which, once, a bit of slot 1's parameters is flipped at step 8.

flipping.py CONFIG.json
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from holdfast.train import __main__ as program
from holdfast.train.loop import Loop

STEP = 8


def main(arguments: list[str]) -> None:
    mark = Path(arguments[0]).with_name("flipped")
    step = Loop._step

    def flipping(self: Loop, one: Any, state: Any) -> Any:
        if one.index == STEP and self._run.slot == 1 and not mark.exists():
            mark.touch()
            value = np.array(state["params"]["norm"])
            value.view(np.uint32)[0] ^= 1
            where = state["params"]["norm"].sharding
            state = {**state, "params": {**state["params"], "norm": jax.device_put(value, where)}}
        return step(self, one, state)

    setattr(Loop, "_step", flipping)  # noqa: B010 - a method is not to be assigned
    program.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
