"""What a person sees of a launch: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, final

import click

if TYPE_CHECKING:
    from holdfast.supervise.status import RunStatus

_SAYINGS: Final = 5
_SOONEST_S: Final = 3.0
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
    """Takes lines and statuses, from any thread."""

    def say(self, line: str) -> None: ...
    def show(self, status: RunStatus) -> None: ...


@contextmanager
def view(*, plain: bool, folder: Path) -> Iterator[Screen]:
    """The screen for this output."""
    from holdfast.cli.terminal import _is_terminal, note

    if plain or not _is_terminal(sys.stderr):
        note(f"run folder: {folder}")
        yield _Lines()
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(file=sys.stderr, highlight=False)
    with Live(console=console, refresh_per_second=5, transient=False, redirect_stdout=False) as live:
        yield _Picture(live, console)


@final
class _Lines:
    """A line for each thing that happened, and now and then where the run is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said: dict[str, None] = {}
        self._where_at = time.monotonic()

    def say(self, line: str) -> None:
        from holdfast.cli.terminal import printable

        with self._lock:
            click.echo(printable(line))

    def show(self, status: RunStatus) -> None:
        from holdfast.cli.status import step_words

        for one in status.decisions:
            # The moment tells two equal sayings apart.
            key = f"{status.wall - one.ago_s:.1f} {one.text}"
            near = (f"{status.wall - one.ago_s + d:.1f} {one.text}" for d in (-0.1, 0.0, 0.1))
            if not any(text in self._said for text in near):
                self._said[key] = None
                self._note(one.text)
        while len(self._said) > 1000:
            del self._said[next(iter(self._said))]
        if time.monotonic() - self._where_at >= _EVERY_S:
            self._where_at = time.monotonic()
            self._note(f"{status.state}, {step_words(status)}")

    def _note(self, text: str) -> None:
        from holdfast.cli.terminal import note

        with self._lock:
            note(f"holdfast: {text}")


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
