"""`holdfast status`: how a run stands."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from holdfast.cli.on_disk import RUNS, reached, refused
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.supervise.status import RunStatus

_LOOK_S: Final = 0.5
_SAYINGS: Final = 8


@click.command()
@click.argument("run", required=False)
@click.option("--folder", type=RUNS, default="runs", show_default=True, help="Where the folders of runs lie.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object; with --follow, one a line.")
@click.option("--follow", is_flag=True, help="Again whenever it changed, until the run is over.")
def status(run: str | None, folder: str, as_json: bool, follow: bool) -> None:
    """Show how a run stands.

    That is: seats, nodes, budgets, failures and decisions. Without RUN, the one that was launched last. Exit
    code 1 if the run is not live and did not end well.
    """
    place = run_folder(Path(folder), run)
    show = _show_json if as_json else _show
    code = _follow(place, show) if follow else _once(place, show)
    if code:
        raise click.exceptions.Exit(code)


def run_folder(folder: Path, run: str | None) -> Path:
    """The folder of a run; of the last one if none is named. Fails: UsageError, StorageError."""
    from holdfast.storage import local_path
    from holdfast.supervise.status import STATUS_FILE

    if run is not None:
        # A path is fine as well, as the shell completes it.
        run = local_path(run)
        place = Path(run) if "/" in run and os.path.isdir(run) else folder / run
        reached(str(place))
        if os.path.exists(place / STATUS_FILE):
            return place
        if os.path.isdir(place):
            raise UsageError(
                f"{place} was not launched: there is no status of it",
                hint=f"what it has done is in {place}/journal.jsonl, and in metrics.jsonl of a `holdfast "
                f"train`; `holdfast ckpt ls {place}/ckpt` shows what is saved",
            )
        if "/" in run:
            reached(run)
        there = sorted(one.name for one in _launched(folder))
        raise UsageError(
            f"there is no run {run!r} in {folder}",
            hint=f"there are {', '.join(there)}" if there else "`holdfast launch --run NAME` starts one",
        )
    found = _launched(folder)
    if not found:
        raise UsageError(
            f"there is no run in {folder}", hint="`holdfast launch` starts one; --folder says where to look"
        )
    return found[-1]


def _launched(folder: Path) -> list[Path]:
    """The folders of runs in `folder`, the one whose status changed last at the end.

    Those that may not be entered are passed over. Fails: StorageError if there are no others.
    """
    from holdfast.supervise.status import STATUS_FILE

    try:
        places = [folder / name for name in os.listdir(folder)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise refused(error, doing="list", path=str(folder)) from error
    found: list[tuple[float, Path]] = []
    closed: dict[Path, OSError] = {}
    for place in places:
        try:
            found.append((os.stat(place / STATUS_FILE).st_mtime, place))
        except PermissionError as error:
            closed[place] = error
        except OSError:
            pass  # no run, or not one that was launched
    if closed and not found:
        place = min(closed)
        raise refused(closed[place], doing="look into", path=str(place)) from closed[place]
    return [place for _, place in sorted(found)]


def read_status(place: Path) -> tuple[RunStatus | None, bool]:
    """What the run says of itself, and whether it is live. Fails: UsageError for a file that is none."""
    import msgspec

    from holdfast.supervise.status import STATUS_FILE, RunStatus

    try:
        found = msgspec.json.decode((place / STATUS_FILE).read_bytes(), type=RunStatus)
    except FileNotFoundError:
        return None, False
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"{place / STATUS_FILE} is no status of a run: {error}",
            hint=f"it is damaged, or of another Holdfast; what the run did is in {place}/journal.jsonl",
        ) from error
    return found, found.code is None and _is_launched(place)


def _is_launched(place: Path) -> bool:
    """Whether a process holds the lock of the run's launch."""
    import fcntl

    from holdfast.supervise.run_lock import LOCK

    try:
        fd = os.open(place / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)


def _once(place: Path, show: Callable[[RunStatus, bool, bool], None]) -> int:
    found, live = read_status(place)
    if found is None:
        raise UsageError(
            f"the run in {place} has said nothing yet", hint="look again in a moment, or use --follow"
        )
    show(found, live, False)
    return 0 if live or found.code == 0 else 1


def _follow(place: Path, show: Callable[[RunStatus, bool, bool], None]) -> int:
    """Show it again whenever it changed. Blocks: until the run is over, or not live any more."""
    last: RunStatus | None = None
    while True:
        found, live = read_status(place)
        if found is not None and found != last:
            show(found, live, True)
            last = found
        if found is not None and not live:
            return 0 if found.code == 0 else 1
        time.sleep(_LOOK_S)


def _show_json(found: RunStatus, live: bool, lines: bool) -> None:
    import msgspec

    from holdfast.cli.terminal import say_json

    say_json({**json.loads(msgspec.json.encode(found)), "live": live}, indent=None if lines else 2)


def _show(found: RunStatus, live: bool, lines: bool) -> None:
    from holdfast.cli.terminal import Column, age, count, say, say_table

    old_s = max(0.0, time.time() - found.wall)
    when = f"live; it last changed {age(old_s)} ago" if live else f"as of {age(old_s)} ago"
    if lines:
        say("")
    say(f"{found.run}: {state_words(found, live)}, {step_words(found)} ({when})")
    if found.message:
        say(found.message)
    columns = [Column("seat"), Column("state"), Column("worker", right=True), Column("node", right=True)]
    columns += [Column("pid", right=True), Column("step", right=True), Column("phase"), Column("median step")]
    say_table([*columns, Column("why", fold=True)], seat_rows(found))
    if found.parked:
        parked = ", ".join(f"worker {one.worker} on node {one.node} ({one.state})" for one in found.parked)
        say(f"parked: {parked}")
    if found.wire_dtype is not None:
        say(f"sums: floats are rounded to {found.wire_dtype}")
    for node in found.nodes:
        marks = [word for word, on in (("lemon", node.lemon), ("spare", node.spare)) if on]
        marks += ["leaving"] if node.leaving else []
        blames = f", blamed {count(node.blames, 'time')}" if node.blames else ""
        say(f"node {node.node}: {', '.join([node.state, *marks])}, {count(node.seats, 'seat')}{blames}")
    for budget in found.budgets:
        allowed = f"of {budget.limit} allowed" if budget.limit else "(no limit)"
        say(f"budget of {budget.culprit}, {budget.cause}: {budget.used} used {allowed}")
    for title, sayings in (("failures", found.failures), ("decisions", found.decisions)):
        if sayings:
            say(f"last {title}:")
        for one in sayings[-_SAYINGS:]:
            say(f"  {age(old_s + one.ago_s):>6} ago  {one.text}")


def state_words(found: RunStatus, live: bool) -> str:
    """The state of the run for people."""
    if live:
        return found.state
    if found.code is None:
        return f"not live any more (its launch, process {found.pid}, is gone)"
    return "done" if found.code == 0 else f"ended with exit code {found.code}"


def step_words(found: RunStatus) -> str:
    """How far it is."""
    return f"step {found.step}" if found.step >= 0 else "no step yet"


def seat_rows(found: RunStatus) -> list[list[str]]:
    """A row of cells for each seat."""
    rows = []
    for seat in found.seats:
        held = seat.worker >= 0
        rows.append(
            [
                f"{seat.replica}.{seat.index}",
                seat.state,
                str(seat.worker) if held else "",
                str(seat.node) if held else "",
                str(seat.pid) if held else "",
                str(seat.step) if held and seat.step >= 0 else "",
                seat.phase if held else "",
                f"{1000 * seat.median_step_s:.0f} ms" if held and seat.median_step_s else "",
                seat.why,
            ]
        )
    return rows
