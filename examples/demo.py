"""Kill what trains, freeze it, kill what holds it together, and end in the same bits.

    make demo        (or: python examples/demo.py [--runs FOLDER] [--plain])

examples/replicas_jax.py runs twice under `holdfast launch`, with three replicas and a parked process:
1. undisturbed;
2. disturbed: one worker gets SIGKILL, one SIGSTOP, and the coordinator SIGKILL.
What you see of run 2 is what its launch shows: a live view on a terminal, lines elsewhere. At the end come
the recoveries, from the run's journal, and the final states of both runs are compared, value by value. Exit
code 1 if anything differs.
"""

import argparse
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from holdfast.errors import HoldfastError
from holdfast.journal import PartRestarted, PartStarted, Record, StepDone, WorkerLost
from holdfast.report import goodput
from holdfast.testing.launched import LaunchedRun

REPLICAS, STEPS = 3, 3000
CALM_STEPS = 150  # between two disturbances, so that the view shows the run well again
DEADLINE_S = 120.0  # for each wait; the whole demo takes about one minute
HERE = Path(__file__).resolve().parent


class DemoError(Exception):
    """Something is not as it should be."""


class Blow(NamedTuple):
    """A signal that was sent, when (wall time), and to whom."""

    name: str
    at: float


def launched(folder: Path, name: str, *, shown: bool, plain: bool) -> LaunchedRun:
    """The training run `name`; it does not outlive its block."""
    return LaunchedRun(
        HERE / "replicas_jax.py",
        str(STEPS),
        folder=folder,
        run=name,
        replicas=REPLICAS,
        parked=1,
        options=["--plain"] if plain else [],
        env={"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        shown=shown,
    )


def finished(run: LaunchedRun) -> None:
    """Wait for the end. Fails unless it is a good one."""
    code = run.wait(DEADLINE_S)
    if code != 0:
        raise DemoError(f"the run in {run.folder} ended with code {code}\n{run.tail()}")


# ---- the disturbances


def disturb(run: LaunchedRun, say: Callable[[str], None]) -> list[Blow]:
    """Hit it three times, each time when it is whole again; what was done."""
    blows: list[Blow] = []

    def hit(name: str, number: signal.Signals, pid: int) -> None:
        say(f"demo: {name}, process {pid}")
        blows.append(Blow(name, time.time()))
        os.kill(pid, number)

    await_whole(run, 0.0)
    await_parked(run)
    hit("SIGKILL to replica 1", signal.SIGKILL, run.pid(replica=1))
    await_whole(run, blows[-1].at)
    await_parked(run)
    hit("SIGSTOP to replica 2", signal.SIGSTOP, run.pid(replica=2))
    await_whole(run, blows[-1].at)
    hit("SIGKILL to the coordinator", signal.SIGKILL, coordinator(run))
    await_whole(run, blows[-1].at)
    return blows


def await_whole(run: LaunchedRun, after: float) -> None:
    """Wait until all replicas train again, and for some more steps."""
    first = run.await_record(lambda one: one.t > after and _is_full(one), DEADLINE_S)
    assert isinstance(first.event, StepDone)
    run.await_step(first.event.step + CALM_STEPS, DEADLINE_S, after=after)


def _is_full(record: Record) -> bool:
    return isinstance(record.event, StepDone) and record.event.replicas == REPLICAS


def await_parked(run: LaunchedRun) -> None:
    """Wait until a process is parked for the next loss."""
    ends = time.monotonic() + DEADLINE_S
    while (status := run.status()) is None or all(one.state != "parked" for one in status.parked):
        if run.process.poll() is not None:
            raise DemoError("the run ended before all was done to it: this machine is too fast for the demo")
        if time.monotonic() > ends:
            raise DemoError(f"the run in {run.folder} had no parked process within {DEADLINE_S:g} s")
        with suppress(subprocess.TimeoutExpired):
            run.process.wait(0.02)


def coordinator(run: LaunchedRun) -> int:
    """The process of the run's coordinator."""
    return [
        record.event.pid
        for record in run.records()
        if isinstance(record.event, PartStarted | PartRestarted) and record.event.part == "coordinator"
    ][-1]


# ---- what came of it


def recoveries(records: Sequence[Record], blows: list[Blow]) -> list[list[str]]:
    """A row for each blow: what, at which step, known after, next step after, full size after."""
    rows = []
    steps = [(one.t, one.event.step) for one in records if isinstance(one.event, StepDone)]
    for blow in blows:
        step = max(number for t, number in steps if t <= blow.at) + 1
        known = min(one.t for one in records if one.t > blow.at and _is_loss(one))
        found = next((one for one in goodput(records).recoveries if one.at == known), None)
        # The death of the coordinator costs no replica, and so is no recovery of one.
        following = min(t for t, _ in steps if t > known)
        next_step_s = following - known if found is None else found.next_step_s
        full = "never left" if found is None else _seconds(found.full_size_s)
        rows.append([blow.name, str(step), _seconds(known - blow.at), _seconds(next_step_s), full])
    return rows


def _is_loss(record: Record) -> bool:
    return isinstance(record.event, WorkerLost | PartRestarted)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (titles, *rows)
    )


def holdfast(*arguments: str) -> int:
    """Show a command and what it prints; its exit code."""
    print(f"\n$ holdfast {' '.join(arguments)}", flush=True)
    program = Path(sys.executable).with_name("holdfast")  # the one installed beside this Python
    return subprocess.run([program, *arguments], timeout=DEADLINE_S, check=False).returncode


# ---- all of it


def demo(folder: Path, *, plain: bool) -> bool:
    """Run it all and print what came of it; whether the final states are equal."""
    began = time.monotonic()
    # The live view draws over what others print meanwhile; and it says itself what happens.
    live = sys.stderr.isatty() and not plain

    def say(text: str) -> None:
        if not live:
            print(text, flush=True)

    print(f"1/3  undisturbed: {STEPS} steps, {REPLICAS} replicas, one parked process", flush=True)
    with launched(folder, "undisturbed", shown=False, plain=plain) as run:
        finished(run)
        calm = goodput(run.records())
    print(f"     {calm.steps} steps in {calm.actual_s:.1f} s")
    print("2/3  the same, with SIGKILL, SIGSTOP, and the coordinator killed", flush=True)
    with launched(folder, "disturbed", shown=True, plain=plain) as run:
        blows = disturb(run, say)
        finished(run)
        records = run.records()
    print("3/3  what came of it\n")
    print(table(["what", "step", "known after", "next step", "full size"], recoveries(records, blows)))
    rough = goodput(records)
    print(
        f"\n  known after: from the signal; next step and full size: from when it was known"
        f"\n  goodput {100 * calm.actual_s / rough.actual_s:.0f}%: "
        f"{calm.steps} steps took {calm.actual_s:.1f} s undisturbed and {rough.actual_s:.1f} s here",
        flush=True,
    )
    ends = [f"{folder / name / 'ckpt'}@{STEPS}" for name in ("undisturbed", "disturbed")]
    listed = holdfast("ckpt", "ls", str(folder / "disturbed" / "ckpt"))
    equal = holdfast("ckpt", "diff", *ends) == 0
    print(f"\nfinal state equals the undisturbed run: {'yes' if equal else 'NO'}")
    print(f"files: {folder}; took {time.monotonic() - began:.0f} s", flush=True)
    return equal and listed == 0


@contextmanager
def fresh_folder(runs: Path) -> Iterator[Path]:
    """A new folder in `runs`. Folders of earlier demos are removed, unless one is still at work there."""
    runs.mkdir(parents=True, exist_ok=True)
    for old in runs.glob("demo-*"):
        with opened(old) as fd:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(old)
    folder = Path(os.path.relpath(tempfile.mkdtemp(prefix="demo-", dir=runs)))
    with opened(folder) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)  # held until this process ends, however it ends
        yield folder


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def on_sigterm(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # through the blocks that end the runs


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where to make the demo's folder")
    parser.add_argument("--plain", action="store_true", help="lines instead of a live view")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        with fresh_folder(options.runs) as folder:
            return 0 if demo(folder, plain=options.plain) else 1
    except (DemoError, HoldfastError, subprocess.TimeoutExpired) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
