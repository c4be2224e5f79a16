"""`python -m holdfast.supervise.worker SCRIPT ARGS`: run a training script as a worker of a run.

It takes what the agent gave it before any of the script's code runs, dumps all stacks into `<run
folder>/crash/<pid>.stacks` on SIGUSR2 (also while something holds the interpreter's lock), and tells by its
exit code whether it is worth trying again: 0 done, 1 failed, 75 start another process, 78 do not.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import TextIO

from holdfast.errors import DeadlineError, FencedError, UsageError
from holdfast.supervise.inheritance import inheritance

RETRY = 75
NO_RETRY = 78
_stacks: list[TextIO] = []


def main(arguments: list[str]) -> int:
    """Run the script; its exit code."""
    if not arguments:
        print("usage: python -m holdfast.supervise.worker SCRIPT [ARGS ...]", file=sys.stderr)
        return NO_RETRY
    try:
        given = inheritance()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return NO_RETRY
    if given is not None:
        _dump_on_signal(Path(given.folder) / "crash")
        given.board.phase("import")
    script = arguments[0]
    sys.argv = arguments
    _import_from(os.path.dirname(os.path.abspath(script)))
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception as error:
        traceback.print_exc()
        return exit_code(error)
    finally:
        _drop_empty()
    return 0


def _import_from(folder: str) -> None:
    """As for `python script.py`: what lies beside the script can be imported, before anything else."""
    if sys.flags.safe_path:
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder  # there it was the working directory, because of `python -m`


def exit_code(error: BaseException) -> int:
    """What an error means for whoever could start the process again."""
    if isinstance(error, FencedError):
        return RETRY
    if isinstance(error, UsageError):
        return NO_RETRY
    return RETRY if isinstance(error, DeadlineError) else 1


def _dump_on_signal(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Open for as long as the process lives: there is no opening files in a signal handler.
    _stacks.append(open(folder / f"{os.getpid()}.stacks", "a", encoding="utf-8"))  # noqa: SIM115
    faulthandler.register(signal.SIGUSR2, file=_stacks[0], all_threads=True, chain=False)


def _drop_empty() -> None:
    """Nothing was dumped: leave no file behind."""
    for file in _stacks:
        with contextlib.suppress(OSError):
            if os.fstat(file.fileno()).st_size == 0:
                os.unlink(file.name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
