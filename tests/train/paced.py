"""A worker whose lanes take a while, so that a run lasts long enough to be disturbed.

paced.py CONFIG.json

Nobody goes beyond sample HELD while there is a file `hold` beside the config.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from holdfast.train import __main__ as program
from holdfast.train.loop import Loop

LANE_S = 0.04
HELD = 160


def main(arguments: list[str]) -> None:
    summed, hold = Loop._summed, Path(arguments[0]).with_name("hold")

    def slower(self: Loop, params: Any, start: int, stop: int) -> Any:
        time.sleep(LANE_S)  # stands for the work of a lane
        while start >= HELD and hold.exists():
            time.sleep(LANE_S)
        return summed(self, params, start, stop)

    setattr(Loop, "_summed", slower)  # noqa: B010 - a method is not to be assigned
    program.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
