"""What a person sees of a launch: a live view on a terminal, plain lines elsewhere.

Whoever supervises a run never waits for an output: a thread of its own does.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TextIO, final

import click

if TYPE_CHECKING:
    from holdfast.supervise.status import RunStatus

_SAYINGS: Final = 5
_SOONEST_S: Final = 3.0
_MOST_LINES: Final = 1000
"""So many lines wait for an output."""
_STUCK_S: Final = 10.0
"""An output that takes nothing for so long when the run is over takes nothing."""
_EVERY_S: Final = 10.0
"""How often a line says where the run is, where there is no terminal."""


@final
class Goodput:
    """How much of the time since the first step was spent on steps; an estimate while the run goes on.

    `holdfast.report` computes it from the journal.
    """

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None

    def share(self, status: RunStatus, now: float) -> float | None:
        """Between 0 and 1; None before it can be said."""
        medians = sorted(seat.median_step_s for seat in status.seats if seat.median_step_s > 0)
        if status.step < 0 or not medians:
            return None
        if self._first is None:
            self._first = (now, status.step)
        since, step = self._first
        if now - since < _SOONEST_S:
            return None
        return min(1.0, (status.step - step) * medians[len(medians) // 2] / (now - since))


class Screen(Protocol):
    """Shows lines of the run, remarks about it, and statuses. Blocks: as long as the output does."""

    def say(self, line: str) -> None: ...
    def note(self, text: str) -> None: ...
    def show(self, status: RunStatus) -> None: ...


@final
class Display:
    """A screen that takes everything at once, from any thread, and shows it on a thread of its own.

    An output that takes nothing (`| less`, Ctrl-S, a stalled connection) holds nobody up: of the statuses
    only the newest waits for it, and of the lines so many; those beyond are counted.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._changed = threading.Condition()
        self._lines: deque[tuple[Callable[[str], None], str]] = deque()
        self._missing = 0
        self._status: RunStatus | None = None
        self._shown = 0
        self._over = False
        self.stuck = False
        """Whether it was left with an output that takes nothing."""
        self._thread = threading.Thread(target=self._run, name="holdfast-display", daemon=True)
        self._thread.start()

    def say(self, line: str) -> None:
        """Show a line of the run, soon."""
        self._add(self._screen.say, line)

    def note(self, text: str) -> None:
        """Show a remark about the run, soon."""
        self._add(self._screen.note, text)

    def show(self, status: RunStatus) -> None:
        """Show how the run stands, soon, unless there is something newer by then."""
        with self._changed:
            self._status = status
            self._changed.notify()

    def _add(self, show: Callable[[str], None], text: str) -> None:
        with self._changed:
            if len(self._lines) >= _MOST_LINES:
                self._missing += 1
                return
            if self._missing:
                self._lines.append((self._screen.say, _gap(self._missing)))
                self._missing = 0
            self._lines.append((show, text))
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._status is not None or self._lines or self._over)
                status, self._status = self._status, None
                line = self._lines.popleft() if self._lines else None
            if status is None and line is None:
                return
            with suppress(OSError):  # nobody is there any more: that ends nothing
                if status is not None:
                    self._screen.show(status)
                if line is not None:
                    line[0](line[1])
            self._shown += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Show what is left. Blocks: while the output takes something, and some seconds."""
        with self._changed:
            self._over = True
            self._changed.notify()
        shown = -1
        with suppress(KeyboardInterrupt):
            while self._thread.is_alive() and self._shown != shown:
                shown = self._shown
                self._thread.join(_STUCK_S)
        self.stuck = self._thread.is_alive()


def _gap(missing: int) -> str:
    from holdfast.cli.terminal import count

    return f"({count(missing, 'line')} {'is' if missing == 1 else 'are'} missing here)"


@final
class Remarks(logging.Handler):
    """Log records as remarks on a display, which never waits for an output either."""

    def __init__(self, display: Display) -> None:
        super().__init__()
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        self._display.note(self.format(record))


@contextmanager
def view(*, plain: bool, folder: Path) -> Iterator[Display]:
    """The display for this output. Leaving it shows what is left, if the output takes it."""
    from holdfast.cli.terminal import _is_terminal

    if plain or not _is_terminal(sys.stderr):
        with Display(_Lines(folder)) as display:
            yield display
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(file=sys.stderr, highlight=False)
    with (
        Live(console=console, refresh_per_second=5, transient=False, redirect_stdout=False) as live,
        Display(_Picture(live, console)) as display,
    ):
        yield display


@final
class _Lines:
    """A line for each thing that happened, and now and then where the run is."""

    def __init__(self, folder: Path) -> None:
        self._folder: Path | None = folder
        self._said: dict[str, None] = {}
        self._where_at = time.monotonic()

    def say(self, line: str) -> None:
        from holdfast.cli.terminal import printable

        with _unheard(sys.stdout):
            click.echo(printable(line))

    def show(self, status: RunStatus) -> None:
        from holdfast.cli.status import step_words
        from holdfast.cli.terminal import note

        if self._folder is not None:  # not before it is certain that there is one
            folder, self._folder = self._folder, None
            with _unheard(sys.stderr):
                note(f"run folder: {folder}")
        for one in status.decisions:
            # The moment tells two equal sayings apart.
            key = f"{status.wall - one.ago_s:.1f} {one.text}"
            near = (f"{status.wall - one.ago_s + d:.1f} {one.text}" for d in (-0.1, 0.0, 0.1))
            if not any(text in self._said for text in near):
                self._said[key] = None
                self.note(one.text)
        while len(self._said) > 1000:
            del self._said[next(iter(self._said))]
        if time.monotonic() - self._where_at >= _EVERY_S:
            self._where_at = time.monotonic()
            self.note(f"{status.state}, {step_words(status)}")

    def note(self, text: str) -> None:
        from holdfast.cli.terminal import note

        with _unheard(sys.stderr):
            note(f"holdfast: {text}")


@contextmanager
def _unheard(stream: TextIO) -> Iterator[None]:
    """Lose what is written where nobody reads, or no room is left: the run goes on without a listener."""
    try:
        yield
    except BrokenPipeError:
        with suppress(OSError, ValueError):  # for good, with what is still to be flushed
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
    except OSError:
        pass


@final
class _Picture:
    """Seats, steps and the last decisions, drawn again and again below the lines of the run."""

    def __init__(self, live: Any, console: Any) -> None:
        self._live = live
        self._console = console
        self._began = time.monotonic()
        self._goodput = Goodput()

    def say(self, line: str) -> None:
        from rich.text import Text

        from holdfast.cli.terminal import printable

        self._console.print(Text(printable(line)))

    def note(self, text: str) -> None:
        self.say(f"holdfast: {text}")

    def show(self, status: RunStatus) -> None:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        from holdfast.cli.status import seat_rows, step_words
        from holdfast.cli.terminal import printable

        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        titles = ("seat", "state", "worker", "node", "pid", "step", "phase", "median step", "why")
        for title in titles:
            table.add_column(Text(title))
        for row in seat_rows(status):
            table.add_row(*(Text(printable(cell)) for cell in row))
        ready = sum(one.state == "parked" for one in status.parked)
        taken_s = time.monotonic() - self._began
        where = step_words(status)
        head = f"{status.run}: {status.state}, {where}, {len(status.parked)} parked ({ready} ready), "
        share = self._goodput.share(status, time.monotonic())
        head += "" if share is None else f"goodput about {100 * share:.0f}%, "
        sayings = [Text(f"  {one.text}"[:200], style="dim") for one in status.decisions[-_SAYINGS:]]
        self._live.update(Group(Text(f"{head}{taken_s:.0f} s", style="bold"), table, *sayings))
