"""What people see: tables, progress, sizes and times. Readable without colour, plain lines off a terminal."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import compress
from typing import Any, Final, NamedTuple

import click

LINE_EVERY_S: Final = 2.0
"""How often a progress line is printed where there is no terminal to draw a bar on."""

_FOLDED: Final = 20
"""Characters that text in several lines needs to be read with ease."""

_SILENT_S: Final = 3.0

Progress = Callable[[int], None]
"""Told the bytes done so far."""


class Column(NamedTuple):
    """A table column; `fold` marks long text that may take several lines.

    One that is `spare` is left out on a terminal that has no room for the others beside it.
    """

    title: str
    right: bool = False
    fold: bool = False
    spare: bool = False


class Styled(NamedTuple):
    """A cell with a colour. The text alone must say it all."""

    text: str
    style: str


Cell = str | Styled


def printable(text: str) -> str:
    """`text` with control characters escaped: names come from disk and may hold terminal codes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def say(text: str = "") -> None:
    """A line of data, on stdout."""
    click.echo(printable(text))


def note(text: str) -> None:
    """A line about the work, on stderr."""
    click.echo(printable(text), err=True)


def say_json(value: Any, *, indent: int | None = 2) -> None:
    """The whole answer as one JSON object, on stdout; without `indent` on one line."""
    click.echo(json.dumps(value, indent=indent, allow_nan=False))


def say_table(columns: Sequence[Column], rows: Iterable[Sequence[Cell]], *, indent: int = 0) -> None:
    """A table on stdout: fitted to a terminal, else one untruncated line per row."""
    shown = [[_clean(cell) for cell in row] for row in rows]
    if _is_terminal(sys.stdout):
        _rich_table(columns, shown, indent)
        return
    texts = [[column.title for column in columns]] + [[cell.text for cell in row] for row in shown]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        cells = [
            text.rjust(width) if column.right else text.ljust(width)
            for text, width, column in zip(row, widths, columns, strict=True)
        ]
        click.echo(" " * indent + "  ".join(cells).rstrip())


def _clean(cell: Cell) -> Styled:
    text, style = (cell, "") if isinstance(cell, str) else cell
    return Styled(printable(text).replace("\n", " "), style)


def _rich_table(columns: Sequence[Column], rows: Sequence[Sequence[Styled]], indent: int) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False)
    if _natural_width(columns, rows) + indent > console.width:
        # rich would shrink the column that may fold, which says the most, to nothing.
        kept = [not column.spare for column in columns]
        columns, rows = [*compress(columns, kept)], [[*compress(row, kept)] for row in rows]
    header = "" if os.environ.get("NO_COLOR") else "bold"
    table = Table(box=None, pad_edge=False, header_style=header, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(
            Text(column.title),
            justify="right" if column.right else "left",
            no_wrap=not column.fold,
            min_width=len(column.title),
            overflow="fold" if column.fold else "ellipsis",
        )
    for row in rows:
        table.add_row(*(Text(cell.text, style=cell.style) for cell in row))
    console.print(Padding(table, (0, 0, 0, indent)))


def _natural_width(columns: Sequence[Column], rows: Sequence[Sequence[Styled]]) -> int:
    """What a table takes whose folded text has a little room."""
    total = 0
    for number, column in enumerate(columns):
        width = max([len(column.title), *(len(row[number].text) for row in rows)])
        total += 2 + (min(width, _FOLDED) if column.fold else width)
    return total


@contextmanager
def progress(label: str, total: int, *, clock: Callable[[], float] = time.monotonic) -> Iterator[Progress]:
    """Progress over `total` bytes on stderr: a bar on a terminal, a line now and then elsewhere."""
    if not _is_terminal(sys.stderr):
        yield _lines(label, total, clock)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    bars = Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with bars:
        task = bars.add_task(escape(printable(label)), total=max(total, 1))
        yield lambda done: bars.update(task, completed=min(done, total))


def _lines(label: str, total: int, clock: Callable[[], float]) -> Progress:
    last = clock()

    def advance(done: int) -> None:
        nonlocal last
        now = clock()
        if now - last >= LINE_EVERY_S:
            last = now
            done = min(done, total)
            note(f"{label}: {100 * done // max(total, 1)}% ({size(done)} of {size(total)})")

    return advance


@contextmanager
def unless_soon(text: str) -> Iterator[None]:
    """Says `text` once, if what happens inside keeps a person waiting."""
    timer = threading.Timer(_SILENT_S, note, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_terminal(stream: Any) -> bool:
    return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"


# ---- words


def size(nbytes: int) -> str:
    """Bytes as a person reads them: `54 B`, `1.5 GiB`."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        value /= 1024
        if value < 999.95 or unit == "PiB":
            break
    return f"{value:.1f} {unit}"


def moment(seconds: float) -> str:
    """Seconds since 1970 as `2026-01-31 12:00:00`, in UTC."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g} s since 1970"


def iso(seconds: float) -> str | None:
    """Seconds since 1970 in ISO 8601, or None beyond the year 9999."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return None


def age(seconds: float) -> str:
    """How old something is: `12 s`, `3 h`; `in 5 min` where clocks disagree."""
    length = abs(seconds)
    units = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
    # Not below two of a unit: "90 min" says more than "1 h".
    unit, per = next((one for one in units if length >= 2 * one[1]), units[-1])
    text = f"{int(length // per)} {unit}"
    return text if seconds >= 0 else f"in {text}"


def count(number: int, one: str, many: str = "") -> str:
    """`1 step`, `2 steps`; `many` is a plural that is not `one` with an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def ranges(numbers: Iterable[int], between: str = ", ") -> str:
    """Numbers as people write them: `0, 2-5, 9`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return between.join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def shorten(text: str, most: int) -> str:
    """`text`, cut at `most` characters."""
    return text if len(text) <= most else text[: most - 3] + "..."
