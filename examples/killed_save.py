"""Train, die in the middle of a save, go on with half the devices, and end in the same bits.

    python examples/killed_save.py [--runs FOLDER]

Three runs of examples/train.py, as processes of their own:
1. the reference: all steps, uninterrupted, on 4 devices;
2. the same on 4 devices, killed with SIGKILL while a save is staged but not yet committed. Its vault finishes
   that save alone;
3. the rest on 2 devices, from the newest step that verifies.
Every loss of runs 2 and 3 is compared bit by bit with the reference. Exit code 1 if anything differs.
"""

import argparse
import fcntl
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from holdfast import journal

STEPS, SAVE_EVERY = 32, 8
KILLED_SAVE, KILLED_STEP = 16, 18  # the save that the trainer does not live to see, and its last step
DEADLINE_S = 120.0  # for each run and each wait; a run takes about ten seconds
HERE = Path(__file__).resolve().parent


class ShowError(Exception):
    """Something is not as it should be."""


@dataclass
class Run:
    """A training process, read line by line."""

    process: subprocess.Popen[str]
    log: Path
    start: int = -1
    losses: dict[int, str] = field(default_factory=dict)

    def lines(self) -> Iterator[int]:
        """Each step as it is printed."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.match(r"starting at step (\d+)", line):
                self.start = int(found[1])
            elif found := re.match(r"step +(\d+) .* bits ([0-9a-f]{8})", line):
                self.losses[int(found[1])] = found[2]
                show_step(line.rstrip())
                yield int(found[1])

    def finish(self) -> None:
        """Read to the end. Fails unless the run reached the last step."""
        for _ in self.lines():
            pass
        code = self.process.wait(DEADLINE_S)
        if code != 0 or STEPS not in self.losses:
            raise ShowError(f"a run ended with code {code}:\n{self.log.read_text()[-4000:]}")


@contextmanager
def training(folder: Path, name: str, *, devices: int, faults: str = "") -> Iterator[Run]:
    """A run of train.py that saves to `folder / name`; it does not outlive the block, nor the deadline."""
    log = folder / f"{name}-{devices}-devices.log"
    command = [
        sys.executable,
        str(HERE / "train.py"),
        "--ckpt",
        str(folder / name),
        "--devices",
        str(devices),
    ]
    command += ["--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]
    settings = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),  # run 2 need not compile what run 1 did
        "HOLDFAST_FAULTS": faults,
    }
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | settings
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    watchdog = threading.Timer(DEADLINE_S, process.kill)  # ends the output, and so whoever reads it
    watchdog.daemon = True
    watchdog.start()
    try:
        with process:
            try:
                yield Run(process, log)
            finally:
                process.kill()
    finally:
        watchdog.cancel()


def killed_while_saving(folder: Path) -> tuple[Run, float]:
    """Run 2. Returns it and the seconds from its death to the commit by its vault."""
    # This save is held up for three seconds on its way to disk, after its bytes are written and before its
    # commit, as by a slow disk. Without that the kill would have to hit a few milliseconds.
    slow = f"vault.part.synced:delay=3@{KILLED_SAVE // SAVE_EVERY}"
    with training(folder, "ckpt", devices=4, faults=slow) as run:
        for step in run.lines():
            if step == KILLED_STEP:
                break
        event_of_save(folder, journal.SaveStaged)
        run.process.send_signal(signal.SIGKILL)
        code = run.process.wait(DEADLINE_S)
        died = time.monotonic()
        for _ in run.lines():  # what it had printed before it died
            pass
    say(f"killed after step {max(run.losses)} with signal {-code}; the save of step {KILLED_SAVE} was staged")
    committed = event_of_save(folder, journal.SaveDurable)
    if committed.m < died or committed.pid == run.process.pid:
        raise ShowError("the save was committed before the kill: this machine was too slow")
    say(f"its vault (process {committed.pid}) committed step {KILLED_SAVE} {committed.m - died:.1f} s later")
    return run, committed.m - died


def event_of_save(folder: Path, kind: type[journal.SaveStaged] | type[journal.SaveDurable]) -> journal.Record:
    """Wait for an event of the save in question in the journal."""
    for record in journal.follow(folder / "ckpt" / "journal.jsonl", timeout_s=DEADLINE_S):
        if isinstance(record.event, kind) and record.event.step == KILLED_SAVE:
            return record
    raise AssertionError("follow ends with an event or a DeadlineError")


def differing(run: Run, reference: Run) -> list[int]:
    """The steps whose loss is not the reference's, bit for bit."""
    return [step for step, bits in run.losses.items() if reference.losses.get(step) != bits]


def holdfast(*arguments: str) -> None:
    """Show a command and what it prints. Fails if it does."""
    say(f"\n$ holdfast {' '.join(arguments)}")
    program = Path(sys.executable).with_name("holdfast")  # the one installed beside this Python
    done = subprocess.run([program, *arguments], timeout=DEADLINE_S, check=False)
    if done.returncode != 0:
        raise ShowError(f"`holdfast {' '.join(arguments)}` ended with code {done.returncode}")


def say(text: str) -> None:
    """Print a line; on a terminal, over the step shown last."""
    print(f"\r\033[K{text}" if sys.stdout.isatty() else text, flush=True)


def show_step(line: str) -> None:
    """On a terminal every step, each over the one before; elsewhere only steps that are saved."""
    if sys.stdout.isatty():
        print(f"\r\033[K  {line}", end="", flush=True)
    elif line.endswith("saving"):
        print(f"  {line}", flush=True)


@contextmanager
def fresh_folder(runs: Path) -> Iterator[Path]:
    """A new folder in `runs`. Those of earlier times are removed, unless one is still at work there."""
    runs.mkdir(parents=True, exist_ok=True)
    for old in runs.glob("killed-save-*"):
        with opened(old) as fd:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(old)
    folder = Path(os.path.relpath(tempfile.mkdtemp(prefix="killed-save-", dir=runs)))
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


def show(folder: Path) -> bool:
    """Run it all and print the summary; whether every number was identical."""
    began = time.monotonic()
    say(f"1/4  reference: {STEPS} steps on 4 devices, uninterrupted")
    with training(folder, "reference", devices=4) as reference:
        reference.finish()
    say(f"2/4  again on 4 devices; SIGKILL will come while step {KILLED_SAVE} is being saved")
    killed, commit_s = killed_while_saving(folder)
    say("3/4  going on with 2 devices")
    with training(folder, "ckpt", devices=2) as resumed:
        resumed.finish()
    say("4/4  what is on disk")
    ckpt = str(folder / "ckpt")
    holdfast("ckpt", "ls", ckpt)
    holdfast("ckpt", "verify", ckpt)
    holdfast("ckpt", "diff", f"{folder / 'reference'}@{STEPS}", f"{ckpt}@{STEPS}")

    wrong = sorted({*differing(killed, reference), *differing(resumed, reference)})
    if resumed.start != KILLED_SAVE:
        raise ShowError(f"resumed from step {resumed.start}, not from {KILLED_SAVE}")
    events = [record.event for record in journal.read(folder / "ckpt" / "journal.jsonl")]
    blocked = [1e3 * event.blocked_s for event in events if isinstance(event, journal.SaveCaptured)]
    last = max(killed.losses)
    rows = {
        "steps": f"{STEPS}, a save every {SAVE_EVERY}",
        "killed": f"SIGKILL after step {last}, while step {KILLED_SAVE} was staged and not committed",
        "committed": f"step {KILLED_SAVE}, by the vault, {commit_s:.1f} s after the trainer was dead",
        "resumed from": f"step {resumed.start}",
        "steps lost": f"{last - resumed.start} (computed again)",
        "devices": "4 before, 2 after",
        "compared": f"{len(killed.losses) + len(resumed.losses)} losses with the reference, bit by bit",
        "identical": "yes" if not wrong else f"NO: steps {wrong}",
        "blocked per save": f"median {statistics.median(blocked):.1f} ms, most {max(blocked):.1f} ms",
        "files": str(folder),
        "took": f"{time.monotonic() - began:.0f} s",
    }
    say("\n" + "\n".join(f"{name:>16}  {value}" for name, value in rows.items()))
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where to make the folder")
    try:
        with fresh_folder(parser.parse_args().runs) as folder:
            return 0 if show(folder) else 1
    except (ShowError, TimeoutError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
