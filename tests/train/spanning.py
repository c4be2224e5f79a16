"""A worker of a replica of several processes, which writes down what it reads and goes wrong if told to.

spanning.py CONFIG.json

Beside the config, each worker adds the ranges of training samples that it reads to `reads-INDEX`. Where there
is a file `fault`, the second worker comes to step STEP once and no further: it kills itself, or holds still
until somebody else does, as the file says (kill, hold).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import jax

from holdfast.train import __main__ as program
from holdfast.train.data import Stream
from holdfast.train.data.packing import Batch
from holdfast.train.loop import Loop

STEP = 4
HOLD_S = 120.0


def main(arguments: list[str]) -> None:
    beside = Path(arguments[0]).parent
    step, read = Loop._step, Stream.batch

    def failing(self: Loop, one: Any, state: Any) -> Any:
        fault = beside / "fault"
        if one.index == STEP and self._run.index == 1 and fault.exists():
            how = fault.read_text(encoding="utf-8")
            fault.unlink()
            if how == "kill":
                self._run._settle(HOLD_S)  # what was saved before is safe, as it mostly is
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait(HOLD_S)
        return step(self, one, state)

    def noting(self: Stream, start: int, stop: int) -> Batch:
        if self.manifest.split == "train":
            with open(beside / f"reads-{jax.process_index()}", "a", encoding="utf-8") as file:
                file.write(f"{start} {stop}\n")
        return read(self, start, stop)

    setattr(Loop, "_step", failing)  # noqa: B010 - a method is not to be assigned
    setattr(Stream, "batch", noting)  # noqa: B010
    program.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
