"""A worker whose lanes take a while, so that a run lasts long enough to be disturbed.

paced.py CONFIG.json
"""

from __future__ import annotations

import sys
import time
from typing import Any

from holdfast.train import __main__ as program
from holdfast.train.loop import Loop

LANE_S = 0.04


def main(arguments: list[str]) -> None:
    summed = Loop._summed

    def slower(self: Loop, params: Any, start: int, stop: int) -> Any:
        time.sleep(LANE_S)  # stands for the work of a lane
        return summed(self, params, start, stop)

    setattr(Loop, "_summed", slower)  # noqa: B010 - a method is not to be assigned
    program.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
