"""What a run tells while it goes on: a record for every step, a line now and then, a bar on a terminal."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from holdfast.train.config import TrainConfig
from holdfast.train.devices import here
from holdfast.train.flops import model_flops
from holdfast.train.metrics import MetricsFile, line_of
from holdfast.train.trackers import Trackers

_DTYPES: Final = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}


@final
class Reporter:
    """Turns what the device gives into numbers, one step behind it: asking for the last step's would wait."""

    def __init__(
        self,
        config: TrainConfig,
        file: MetricsFile,
        trackers: Trackers,
        *,
        say: Callable[[str], None],
        bar: bool,
        total: int,
    ) -> None:
        self._config, self._file, self._trackers = config, file, trackers
        self._say = say
        self._total = total
        self._peak = here().peak(_DTYPES.get(config.model.compute_dtype, ""))
        self._waiting: tuple[dict[str, Any], Mapping[str, Any], bool] | None = None
        self._at = time.monotonic()
        self._known = False
        self.last: dict[str, Any] = {}
        self._bar = _Bar(total) if bar else None

    def step(self, numbers: Mapping[str, Any], found: Mapping[str, Any], *, leads: bool) -> None:
        """A step is on its way. `numbers` are known, `found` will be. Blocks: for the step before."""
        before, self._waiting = self._waiting, (dict(numbers), found, leads)
        if before is not None:
            self._finish(*before)

    def flush(self) -> None:
        """Wait for the last step, and tell of it."""
        if self._waiting is not None:
            before, self._waiting = self._waiting, None
            self._finish(*before)

    def lap(self, found: Mapping[str, Any] | None = None) -> float:
        """Seconds from the end of the step before to now, the end of this one: `numbers["seconds"]` of it.

        For a step whose end is known, or which is to end before something else begins: then give `found`.
        Blocks: with `found`, until that is computed.
        """
        if found is not None:
            self.flush()
            jax.block_until_ready(dict(found))  # type: ignore[no-untyped-call]
        now = time.monotonic()
        seconds, self._at = now - self._at, now
        return seconds

    def restart_clock(self) -> None:
        """What happens until now is no part of a step: a compile, an evaluation."""
        self._at = time.monotonic()

    def close(self) -> None:
        self._file.close()
        self._trackers.close()
        if self._bar is not None:
            self._bar.close()

    def _finish(self, numbers: dict[str, Any], found: Mapping[str, Any], leads: bool) -> None:
        values = {name: float(value) for name, value in found.items()}
        # Without a time of its own it ended now: its values have just come.
        seconds = max(numbers["seconds"] if "seconds" in numbers else self.lap(), 1e-9)
        size = numbers.pop("batch")
        num_devices = numbers.pop("devices")
        record = {**numbers, **values, "seconds": seconds}
        record["tokens_per_s"] = size * self._config.seq_len / seconds
        rate = model_flops(self._config.model, size, self._config.seq_len).total / seconds / num_devices
        record["tflops"] = rate / 1e12
        if self._peak:
            record["mfu"] = rate / self._peak
        step = record["step"] + 1
        shown = step % self._config.log.every == 0 or step == self._total or not self._known
        if shown:
            record["memory"] = memory()
        self._known = True
        self.last = record
        self._file.add(record, leads=leads)
        if leads:
            self._trackers.log(record["step"], record)
            self._show(record, shown)

    def _show(self, record: dict[str, Any], shown: bool) -> None:
        line = line_of(record, self._total) if shown else ""
        if self._bar is not None:
            self._bar.update(record, line)
        elif shown:
            self._say(line)


@final
class _Bar:
    """A progress bar that log lines scroll past."""

    def __init__(self, total: int) -> None:
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}  {task.fields[speed]:,.0f} tokens/s"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("train", total=total, loss=float("nan"), speed=0.0)
        self._progress.start()

    def update(self, record: Mapping[str, Any], line: str) -> None:
        self._progress.update(
            self._task, completed=record["step"] + 1, loss=record["loss"], speed=record["tokens_per_s"]
        )
        if line:
            self._progress.console.print(line, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


def memory() -> int:
    """The most bytes in use so far on this worker's first device; without a figure, in this process."""
    stats = jax.local_devices()[0].memory_stats() or {}
    found = stats.get("peak_bytes_in_use", 0)
    return int(found) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def on_terminal() -> bool:
    """Whether somebody looks."""
    return sys.stderr.isatty()
