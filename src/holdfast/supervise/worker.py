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
import textwrap
import traceback
from pathlib import Path
from types import TracebackType
from typing import Final, TextIO

from holdfast.errors import DeadlineError, FencedError, HoldfastError, NoCheckpointError, UsageError
from holdfast.supervise import garbage
from holdfast.supervise.decisions import NO_RETRY_CODE, RETRY_CODE
from holdfast.supervise.inheritance import Inheritance, inheritance
from holdfast.supervise.messages import Failed

_MAX_REASON: Final = 500
_stacks: list[TextIO] = []


def main(arguments: list[str]) -> int:
    """Run the script; its exit code."""
    garbage.defer()
    if not arguments:
        print("usage: python -m holdfast.supervise.worker SCRIPT [ARGS ...]", file=sys.stderr)
        return NO_RETRY_CODE
    try:
        given = inheritance()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return NO_RETRY_CODE
    if given is not None:
        _dump_on_signal(Path(given.folder) / "crash")
        given.board.phase("import")
    script = arguments[0]
    sys.argv = arguments
    _import_from(os.path.dirname(os.path.abspath(script)))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as left:
        if isinstance(left.__cause__, Exception):
            _tell(given, reason_of(left.__cause__))
        elif isinstance(left.code, str):
            _tell(given, left.code)
        raise
    except Exception as error:
        _print(error)
        _tell(given, reason_of(error))
        return exit_code(error, script)
    finally:
        _drop_empty()
    return 0


def reason_of(error: BaseException) -> str:
    """An error's kind and what happened. What to do about it is not why it happened."""
    text = error.message if isinstance(error, HoldfastError) else str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _tell(given: Inheritance | None, reason: str) -> None:
    """Let the agent know why this process ends; without it, it has only the log."""
    if given is not None:
        text = textwrap.shorten(reason, _MAX_REASON, placeholder=" ...")
        given.orders.send(Failed(text.encode(errors="backslashreplace").decode()))


def _print(error: BaseException) -> None:
    """Print an error with its frames; of a mistake in a call of Holdfast, those of the program alone."""
    found = traceback.TracebackException(type(error), error, _of_the_script(error))
    mistake = isinstance(error, UsageError | NoCheckpointError)
    if mistake and os.environ.get("HOLDFAST_DEBUG", "0") in ("", "0"):
        ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
        found.stack = traceback.StackSummary.from_list(
            [frame for frame in found.stack if not frame.filename.startswith(ours)]
        )
    print("".join(found.format()), end="", file=sys.stderr, flush=True)


def _of_the_script(error: BaseException) -> TracebackType | None:
    """The frames of an error from the script's own on; none if it could not be compiled."""
    trace = error.__traceback__
    while trace is not None and any(trace.tb_frame.f_globals is one for one in (globals(), vars(runpy))):
        trace = trace.tb_next
    return trace


def _import_from(folder: str) -> None:
    """As for `python script.py`: what lies beside the script can be imported, before anything else."""
    if sys.flags.safe_path:
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder  # there it was the working directory, because of `python -m`


def exit_code(error: BaseException, script: str = "") -> int:
    """What an error means for whoever could start the process again to run `script`."""
    if isinstance(error, FencedError):
        return RETRY_CODE
    if isinstance(error, UsageError | NoCheckpointError):
        return NO_RETRY_CODE
    if script and isinstance(error, SyntaxError) and error.filename == script:
        return NO_RETRY_CODE
    return RETRY_CODE if isinstance(error, DeadlineError) else 1


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
