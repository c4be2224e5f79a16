"""Scale: a checkpoint of 10,000 writers opened, planned and committed; 10,000 steps listed."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import machine
from bench.report import Bar, Report, Series

BARS = {
    "open_10k_s": Bar("read and check the manifest of 10,000 writers and 1,000 arrays", "at most", 1),
    "open_10k_peak_mb": Bar("memory for that, above the imports, MB", "at most", 256),
    "plan_512th_s": Bar("plan the part of one of 512 readers, its indexes read", "at most", 1),
    "plan_512th_parts": Bar("parts that such a reader needs, of 10,000", "at most", 200),
    "save_plan_10k_s": Bar("who writes what, as each of 10,000 writers works out once", "at most", 10),
    "commit_10k_s": Bar("one core's time for the commit of 10,000 writers", "at most", 5),
    "list_10k_steps_s": Bar("the steps of a folder with 10,000 of them", "at most", 1),
    "retain_10k_steps_s": Bar("what to remove of 10,000 known steps", "at most", 0.5),
    "ls_10k_steps_s": Bar("`holdfast ckpt ls` of 10,000 steps", "at most", 10),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--rounds", type=int, default=3, help="readers and listings measured (default 3)")
    parser.add_argument("--dir", type=Path, help="folder for the files, about 1.5 GB (default: build/)")


def run(args: argparse.Namespace) -> Report:
    """Make the files, then measure everything."""
    from bench.scale.scales import SCALES

    name = "smoke" if args.smoke else "full"
    scale, rounds = SCALES[name], 1 if args.smoke else args.rounds
    found: dict[str, list[float]] = {}
    with machine.work_folder(args.dir or Path("build"), "scale") as folder:
        about = machine.description(folder)
        _note(found, "", _committed(folder, scale))
        for number in range(rounds):
            progress(f"reader {number + 1} of {rounds}")
            rank = (number * 211 + 100) % scale.readers.world
            _note(found, "reader ", _reader(folder / "ckpt", name, rank))
        _note(found, "steps ", *_listings(folder / "steps", scale.steps, rounds))
    raw = {what: Series(tuple(values), unit=_unit(what)) for what, values in found.items()}
    notes = ["a smoke run: a small state and cold code, the numbers mean nothing"] if args.smoke else []
    return Report(
        bars=BARS,
        values=_values(raw),
        method=_method(scale, rounds, about),
        versions=machine.versions("holdfast", "msgspec", "numpy", "xxhash"),
        raw=raw,
        notes=notes,
    )


def _committed(folder: Path, scale: Any) -> dict[str, float]:
    """Write the step of all writers, and measure what they do together."""
    from bench.scale.agreement import Simulation, ballots_of, manifest_of
    from bench.scale.generation import write_parts
    from bench.scale.synthetic import Writers, layouts
    from holdfast.arrays import spread

    progress(f"{scale.writers.world:,} writers plan their save")
    state = layouts(scale.model, scale.writers)
    started = time.process_time()
    spread(state)
    save_plan_s = time.process_time() - started
    writers = Writers(scale.model, scale.writers)
    progress("their parts are written, without array bytes")
    parts = write_parts(folder / "ckpt", writers)
    ballots = ballots_of(writers, parts)
    progress("they agree")
    traffic = Simulation(len(parts)).commit(ballots)
    started = time.process_time()
    data = manifest_of(writers, ballots)
    manifest_s = time.process_time() - started
    (folder / "ckpt" / writers.folder / "manifest.json").write_bytes(data)
    return {
        "save plan": save_plan_s,
        "state TB": state.nbytes / 1e12,
        "coordinator": traffic.cpu_s,
        "manifest made": manifest_s,
        "messages in": traffic.messages_in,
        "messages out": traffic.messages_out,
        "MB in": traffic.bytes_in / 1e6,
        "MB out": traffic.bytes_out / 1e6,
        "records": traffic.records,
        "MB of indexes": sum(part.size for part in parts) / 1e6,
    }


def _reader(folder: Path, scale: str, rank: int) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.scale.reading", str(folder), scale, str(rank)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=600)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _listings(folder: Path, count: int, rounds: int) -> Iterator[dict[str, float]]:
    from bench.scale.steps import make_steps, measured

    progress(f"{count:,} steps are made")
    make_steps(folder, count)
    for number in range(rounds):
        progress(f"listing {number + 1} of {rounds}")
        yield measured(folder)


def _note(found: dict[str, list[float]], prefix: str, *rounds: Mapping[str, float]) -> None:
    for one in rounds:
        for what, value in one.items():
            found.setdefault(prefix + what, []).append(float(value))


def _unit(what: str) -> str:
    if what.endswith("mb") or "MB" in what:
        return "MB"
    timed = what.endswith("_s") or what in ("save plan", "coordinator", "manifest made")
    return "s" if timed else ""


def _values(raw: Mapping[str, Series]) -> dict[str, float | None]:
    return {
        "open_10k_s": raw["reader open_s"].median,
        "open_10k_peak_mb": raw["reader open_peak_mb"].median,
        "plan_512th_s": raw["reader plan_s"].median,
        "plan_512th_parts": raw["reader parts"].median,
        "save_plan_10k_s": raw["save plan"].median,
        "commit_10k_s": raw["coordinator"].median + raw["manifest made"].median,
        "list_10k_steps_s": raw["steps list_s"].median,
        "retain_10k_steps_s": raw["steps decide_s"].median,
        "ls_10k_steps_s": raw["steps ls_s"].median,
    }


def _method(scale: Any, rounds: int, about: str) -> str:
    return (
        f"A synthetic state on {scale.writers.world:,} writers, made by the format's own writers: manifest "
        "and indexes as a run would commit them (block digests made up), data files as holes of the right "
        f"size. Readers: medians of {rounds}, each a process of its own and another rank of "
        f"{scale.readers.world}; opening is the whole manifest read, verified and checked; planning is "
        "template, plan, the needed indexes and the list of blocks; wall time, page cache warm, the rest of "
        "the machine as it was. Commit: CPU time of the coordinator's core with every message encoded and "
        "decoded, without sockets and disk, and of "
        "rank 0 making the manifest. Steps: small states of one writer, `ckpt ls` as a process with its "
        f"start. Machine: {about}."
    )


def progress(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)
