"""The one entry point: pick a benchmark, run it, print a table or one JSON object."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from importlib import import_module
from types import FrameType
from typing import Protocol, TextIO, cast

from bench.report import Refused, Report

COMMANDS = {
    "checkpoint": "bench.checkpoint",
    "coord": "bench.coord",
    "load": "bench.load",
    "recovery": "bench.recovery",
    "reduce": "bench.reduce",
    "scale": "bench.scale",
    "train": "bench.train",
    "transfer": "bench.transfer",
}
"""Each module offers a docstring, `configure(parser)` and `run(args)`; a new benchmark is one line here."""


class Benchmark(Protocol):
    """What a benchmark's module offers."""

    __doc__: str | None

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the benchmark's own options."""

    def run(self, args: argparse.Namespace) -> Report:
        """Measure; progress goes to stderr."""


def main() -> int:
    """Run one benchmark. Missed bars are shown, not turned into an exit code: 0 means measured."""
    parser = argparse.ArgumentParser(prog="python -m bench")
    chosen = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    benchmarks: dict[str, Benchmark] = {}
    for name, module in COMMANDS.items():
        benchmark = benchmarks[name] = cast(Benchmark, import_module(module))
        about = (benchmark.__doc__ or "").strip().splitlines()[0]
        own = chosen.add_parser(name, help=about, description=about)
        own.add_argument("--json", action="store_true", help="print one JSON object on stdout")
        own.add_argument("--smoke", action="store_true", help="very little, once: shows that it runs")
        benchmark.configure(own)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)
    out = _own_stdout()
    try:
        report = benchmarks[args.name].run(args)
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; all files of the benchmark are removed", file=sys.stderr)
        return 130
    out.write(report.as_json() + "\n" if args.json else report.as_text())
    out.flush()
    return 0


def _own_stdout() -> TextIO:
    """Stdout for the result alone: whatever a peer prints goes to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
