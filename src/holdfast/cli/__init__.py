"""The `holdfast` command: parse, call, print.

Data goes to stdout, everything else to stderr. Importing this costs next to nothing, and using `main` costs
`click`; each command brings what it needs when it runs.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

if TYPE_CHECKING:
    from holdfast.cli.program import main
else:

    class _Main:
        """The program, imported when it is first used. Called, it is this process: Ctrl-C is quiet."""

        def __call__(self, *args: Any, **extra: Any) -> NoReturn:
            try:
                _at_ctrl_c(_Interrupt())
                _program()(*args, **extra)
            except KeyboardInterrupt:  # where the program does not see to it: before, after, or a second one
                os._exit(_INTERRUPTED)
            except SystemExit as end:
                # What was asked for is done, or said to have failed: an interpreter that is interrupted at
                # its end would have more to say, and another exit code.
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
                _at_ctrl_c(_Interrupt(code))
                raise

        def __getattr__(self, name: str) -> Any:
            return getattr(_program(), name)

    main = _Main()

__all__ = ["main"]

_INTERRUPTED: Final = 130
_IMPORTING: Final = "<frozen importlib._bootstrap>"


def _program() -> Any:
    from holdfast.cli.program import main as program

    return program


@final
class _Interrupt:
    """Raises KeyboardInterrupt, as Python does; but during an import, or with `code`, the process ends.

    An import that is interrupted can end in anything: numpy's prints a traceback and fails in another way.
    The end is at once, past every `finally`, as by SIGKILL.
    """

    def __init__(self, code: int | None = None) -> None:
        self._code = code

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._code is not None:
            os._exit(self._code)
        seen = frame
        while seen is not None:
            if seen.f_code.co_filename == _IMPORTING:
                with suppress(OSError):
                    os.write(2, b"\ninterrupted\n")
                os._exit(_INTERRUPTED)
            seen = seen.f_back
        signal.default_int_handler(number, frame)


def _at_ctrl_c(handler: _Interrupt) -> None:
    """Have Ctrl-C handled so from now on; where it is ignored, or handled by others, it stays so."""
    now = signal.getsignal(signal.SIGINT)
    if now is signal.default_int_handler or isinstance(now, _Interrupt):
        with suppress(ValueError):  # of a thread, which Ctrl-C does not reach
            signal.signal(signal.SIGINT, handler)
