"""The program around the commands: what a person sees when something goes wrong, and exit codes.

0 done; 1 the command's own "no" (problems found, different); 2 a mistake or an error; 130 interrupted;
141 the reader of the output went away.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, Final, NoReturn, final

import click

from holdfast import __version__
from holdfast.cli.ckpt import ckpt
from holdfast.cli.coord import coord, coordinator
from holdfast.cli.data import data
from holdfast.cli.hub import hub
from holdfast.cli.launch import launch, resize
from holdfast.cli.moving import export_step, import_step
from holdfast.cli.option_names import in_options
from holdfast.cli.plan import plan
from holdfast.cli.status import status
from holdfast.cli.sums import sums
from holdfast.cli.train import train
from holdfast.cli.transfer import transfer
from holdfast.errors import FormatError, HoldfastError, StorageError, UsageError

ERROR: Final = 2
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141


@final
class Program(click.Group):
    """A command group that ends in an exit code and never in a traceback."""

    def main(
        self, args: Sequence[str] | None = None, prog_name: str | None = None, *rest: Any, **extra: Any
    ) -> NoReturn:
        extra.pop("standalone_mode", None)
        _escape_unprintable()
        given = list(sys.argv[1:] if args is None else args)
        sys.exit(self._exit_code(given, prog_name or "holdfast", extra))

    def __call__(self, *args: Any, **extra: Any) -> NoReturn:
        """`main` as this process: one that is interrupted ends without its interpreter's usual end.

        Ctrl-C leaves threads of the compiler at work (jaxlib's `compile_and_load` stops waiting for them, not
        them), and an interpreter that ends takes what they work with away from under them: SIGSEGV. Python's
        own blocks have ended by now, so nothing is left to be done.
        """
        try:
            self.main(*args, **extra)
        except SystemExit as end:
            if end.code == INTERRUPTED:
                _leave(INTERRUPTED)
            raise

    def _exit_code(self, args: list[str], name: str, extra: dict[str, Any]) -> int:
        try:
            with self.make_context(name, args, **extra) as context:
                self.invoke(context)
            sys.stdout.flush()
        except click.exceptions.Exit as done:
            return done.exit_code
        except (KeyboardInterrupt, click.Abort):
            return _interrupted()
        except BrokenPipeError:
            return _broken_pipe()
        except click.exceptions.NoArgsIsHelpError as no_args:
            click.echo(no_args.format_message(), err=True)
            return ERROR
        except Exception as error:
            return _failed(error, *self._asked(args, name))
        return 0

    def _asked(self, args: list[str], name: str) -> tuple[click.Command, str]:
        """The command that the words ask for, and what a person types for it."""
        command: click.Command = self
        for word in args:
            found = command.commands.get(word) if isinstance(command, click.Group) else None
            if found is None:
                break
            command, name = found, f"{name} {word}"
        return command, name


def _failed(error: Exception, command: click.Command, name: str) -> int:
    """Say what went wrong on stderr; the exit code."""
    if os.environ.get("HOLDFAST_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)
    message, hint = _explained(error, command, name)
    try:
        click.echo(f"error: {message}", err=True)
        if hint is not None:
            click.echo(f"\nhint: {hint}", err=True)
    except BrokenPipeError:
        return _broken_pipe()
    return ERROR


def _explained(error: Exception, asked: click.Command, name: str) -> tuple[str, str | None]:
    from holdfast.cli.terminal import printable

    if isinstance(error, HoldfastError):
        hint = error.hint or _usual_hint(error, name)
        return printable(in_options(error.message, asked)), printable(in_options(hint, asked))
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx is not None else "holdfast"
        return _sentence(error.format_message()), f"see '{command} --help'"
    if isinstance(error, click.ClickException):
        return _sentence(error.format_message()), None
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename is not None else ""
        usual = StorageError.from_os(error, doing="use", path=where)
        return printable(f"{where}{error.strerror}"), usual.hint
    said = printable(str(error)) or "no message"
    return (
        f"unexpected {type(error).__name__}: {said}",
        "this is a bug in holdfast; set HOLDFAST_DEBUG=1 for the traceback",
    )


def _usual_hint(error: HoldfastError, name: str) -> str:
    """What to do about an error that does not say so itself."""
    if isinstance(error, UsageError):
        return f"see '{name} --help'"
    if isinstance(error, FormatError):
        return "the file is damaged, cut off or of another kind; copy it or make it again"
    return "set HOLDFAST_DEBUG=1 to see where it comes from"


def _sentence(text: str) -> str:
    """A message of click's in the style of ours: one line, no capital, no full stop."""
    from holdfast.cli.terminal import printable

    return printable(" ".join((text[:1].lower() + text[1:].rstrip(".")).split()))


def _interrupted() -> int:
    # The terminal shows ^C without a line end.
    click.echo("\ninterrupted", err=True)
    return INTERRUPTED


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _broken_pipe() -> int:
    # Python flushes stdout once more at exit; let that go nowhere instead of failing loudly.
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return BROKEN_PIPE


def _escape_unprintable() -> None:
    """Names and paths may hold characters that the terminal's encoding lacks: show them escaped."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s")
def main() -> None:
    """Keep large training runs going: launch and watch them; look at, check and tidy what they saved;
    serve and look at the coordinator that keeps them together.

    \b
    Output is a table for people, or one JSON object with --json.
    Exit codes: 0 fine, 1 problems or differences found, 2 error.
    Environment: NO_COLOR=1 no colours, HOLDFAST_DEBUG=1 tracebacks.
    """


ckpt.add_command(export_step)
ckpt.add_command(import_step)
main.add_command(ckpt)
main.add_command(coord)
main.add_command(coordinator)
main.add_command(data)
main.add_command(hub)
main.add_command(launch)
main.add_command(plan)
main.add_command(resize)
main.add_command(status)
main.add_command(sums)
main.add_command(train)
main.add_command(transfer)
