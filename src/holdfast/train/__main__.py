"""A run from a config file, alone or under launch.

python -m holdfast.train CONFIG.json [OPTIONS.json]
holdfast launch --replicas 3 .../holdfast/train/__main__.py CONFIG.json [OPTIONS.json]

Exit codes: 0 done, 1 failed, 75 stopped or to be tried again, 78 a mistake that another process would meet
too.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.errors import DataError, HoldfastError, NoCheckpointError, UsageError
from holdfast.supervise.decisions import NO_RETRY_CODE, RETRY_CODE
from holdfast.supervise.worker import exit_code
from holdfast.train.config import TrainConfig
from holdfast.train.overrides import from_mapping
from holdfast.train.program import run_training
from holdfast.train.state import RunOptions

_USAGE: Final = "python -m holdfast.train CONFIG.json [OPTIONS.json]"
_LASTING: Final = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
"""What the file system says of a mistake; everything else it says may be over at the next try."""


def main(arguments: list[str]) -> None:
    """Train as the files say. Ends the process with a message and an exit code if that fails."""
    try:
        config, options = _read(arguments)
        outcome = run_training(config, options)
    except HoldfastError as error:
        if os.environ.get("HOLDFAST_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(NO_RETRY_CODE if _lasts(error) else exit_code(error)) from error
    print(f"{outcome.steps} steps, state {outcome.state}, ledger {outcome.ledger}", flush=True)
    if outcome.stopped:
        print("stopped; the same command goes on from there", file=sys.stderr, flush=True)
        raise SystemExit(RETRY_CODE)


def _lasts(error: HoldfastError) -> bool:
    """Whether the next process would meet the same mistake."""
    if isinstance(error, DataError) and isinstance(error.__cause__, OSError):
        return isinstance(error.__cause__, _LASTING)
    return isinstance(error, UsageError | DataError | NoCheckpointError)


def _read(arguments: list[str]) -> tuple[TrainConfig, RunOptions]:
    if not 1 <= len(arguments) <= 2:
        raise UsageError(f"{len(arguments)} arguments, not one or two", hint=_USAGE)
    config = TrainConfig.from_json(_bytes(arguments[0]))
    if len(arguments) == 1:
        return config, RunOptions()
    try:
        told = msgspec.json.decode(_bytes(arguments[1]), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise UsageError(f"{arguments[1]} holds no options: {error}", hint=_USAGE) from error
    return config, from_mapping(RunOptions, told)


def _bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint=_USAGE) from error


if __name__ == "__main__":
    main(sys.argv[1:])
