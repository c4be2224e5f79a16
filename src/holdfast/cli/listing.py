"""`holdfast ckpt ls`: the steps of a folder and the state of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from holdfast.checkpoint import StepInfo, Whereabouts, each, in_flight, step_info
from holdfast.cli import terminal
from holdfast.cli.terminal import Cell, Column, Styled
from holdfast.errors import HoldfastError, NoCheckpointError
from holdfast.format import MANIFEST, parse_step_folder, step_folder
from holdfast.storage import Store, opened

Status = Literal["committed", "unreadable", "being written", "uncommitted"]

_STYLES: Mapping[Status, str] = {
    "committed": "",
    "unreadable": "red",
    "being written": "cyan",
    "uncommitted": "yellow",
}
_REASONS: Mapping[Status, str] = {
    "uncommitted": "left by a save that never finished; the next run removes it",
    "being written": "a live process is at work on it",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One step folder. `info` is there exactly if the step is committed and its manifest readable."""

    step: int
    status: Status
    nbytes: int
    info: StepInfo | None = None
    reason: str | None = None
    places: tuple[str, ...] = ()
    """Where the step lies, of the folder and its mirrors; empty if it is not committed."""

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers that `best` in a retention policy can use."""
        if self.info is None:
            return {}
        meta = self.info.meta
        nested = meta.get("metrics")
        names = [*(nested if isinstance(nested, Mapping) else ()), *meta]
        found = {name: self.info.metric(name) for name in dict.fromkeys(names) if name != "samples"}
        return {name: value for name, value in found.items() if value is not None}


def rows(store: Store) -> list[Row]:
    """Every step folder, oldest step first."""
    busy = set(in_flight(store))
    steps = sorted(s for name in store.names() if (s := parse_step_folder(name)) is not None)
    return each(store, steps, lambda place, step: _row(place, step, busy))


def mirrored(store: Store, found: Sequence[Row], where: Whereabouts) -> list[Row]:
    """The rows with the places of each step, and those of steps that only a mirror has."""
    mine = {row.step for row in found if row.status == "committed"}
    listed = {
        row.step: replace(row, places=((store.root,) if row.step in mine else ()) + tuple(where.of(row.step)))
        for row in found
    }
    for place, steps in where.steps.items():
        far = [step for step in steps if step not in listed]
        for row in each(opened(place), far, lambda at, step: _row(at, step, set())):
            listed[row.step] = replace(row, places=tuple(where.of(row.step)))
    return [listed[step] for step in sorted(listed)]


def _row(store: Store, step: int, busy: set[int]) -> Row:
    folder = step_folder(step)
    if store.exists(folder, MANIFEST):
        try:
            info = step_info(store, step)
            return Row(step, "committed", info.nbytes, info)
        except NoCheckpointError:
            pass  # pruned between the two looks
        except HoldfastError as error:
            return Row(step, "unreadable", _nbytes(store, folder), reason=error.message)
    status: Status = "being written" if step in busy else "uncommitted"
    return Row(step, status, _nbytes(store, folder), reason=_REASONS[status])


def _nbytes(store: Store, folder: str) -> int:
    return sum(store.size(folder, name) or 0 for name in store.names(folder))


def say(found: Sequence[Row], *, now: float, root: str = "", where: Whereabouts | None = None) -> None:
    """The listing for people: a table that fits 80 columns, then why a step is not simply committed.

    `where` are the mirrors of the folder at `root`; without any, there is nothing to say about places.
    """
    mirrors = [*where.steps, *where.problems] if where is not None else []
    metrics = any(row.info is not None and _numbers(row) for row in found)
    pinned = any(row.info is not None and row.info.pinned for row in found)
    columns = [
        Column("STEP", right=True),
        Column("CREATED (UTC)"),
        Column("AGE", right=True),
        Column("SIZE", right=True),
        Column("ARRAYS", right=True, spare=True),
        Column("PARTS", right=True, spare=True),
        Column("STATUS"),
        *([Column("WHERE")] if mirrors else []),
        *([Column("PINNED")] if pinned else []),
        *([Column("METRICS", fold=True)] if metrics else []),
    ]
    rows = [_cells(row, now, pinned, metrics) for row in found]
    if mirrors:
        for cells, row in zip(rows, found, strict=True):
            cells.insert(7, _where(row, root, mirrors))
    terminal.say_table(columns, rows)
    for number, place in enumerate(mirrors):
        trouble = where.problems.get(place) if where is not None else None
        silent = f" does not answer: {trouble.message}" if trouble is not None else ""
        terminal.say(f"{_mirror_name(number, mirrors)}: {place}{silent}")
    for row in found:
        if row.reason is not None:
            terminal.say(f"step {row.step} is {row.status}: {row.reason}")


def _cells(row: Row, now: float, pinned: bool, metrics: bool) -> list[Cell]:
    info = row.info
    cells: list[Cell] = [
        str(row.step),
        terminal.moment(info.created)[:16] if info else "-",
        terminal.age(now - info.created) if info else "-",
        terminal.size(row.nbytes),
        str(info.num_arrays) if info else "-",
        str(info.num_parts) if info else "-",
        Styled(row.status, _STYLES[row.status]),
    ]
    if pinned:
        cells.append("yes" if info and info.pinned else "-")
    if metrics:
        cells.append(_numbers(row) or "-")
    return cells


def _where(row: Row, root: str, mirrors: Sequence[str]) -> str:
    words = ["folder"] if root in row.places else []
    words += [_mirror_name(number, mirrors) for number, place in enumerate(mirrors) if place in row.places]
    return "+".join(words) or "-"


def _mirror_name(number: int, mirrors: Sequence[str]) -> str:
    return "mirror" if len(mirrors) == 1 else f"mirror {number + 1}"


def _numbers(row: Row) -> str:
    words = [f"{name}={_number(value)}" for name, value in row.metrics.items()]
    if row.info is not None and row.info.samples is not None:
        words.append(f"samples={row.info.samples}")
    return " ".join(words)


def _number(value: float) -> str:
    """A count in full, anything else to four digits."""
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def as_json(store: Store, found: Sequence[Row]) -> dict[str, Any]:
    """The listing as one object."""
    return {"path": store.root, "steps": [_row_json(row) for row in found]}


def _row_json(row: Row) -> dict[str, Any]:
    info = row.info
    return {
        "step": row.step,
        "status": row.status,
        "reason": row.reason,
        "bytes": row.nbytes,
        "created": terminal.iso(info.created) if info else None,
        "arrays": info.num_arrays if info else None,
        "parts": info.num_parts if info else None,
        "attempt": info.attempt if info else None,
        "pinned": info.pinned if info else False,
        "samples": info.samples if info else None,
        "metrics": row.metrics,
        "places": list(row.places),
    }
