"""The numbers of a run: a line of JSON for each step, none twice, and a line for people now and then."""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

import msgspec

log = logging.getLogger("holdfast.train")

_CHUNK: Final = 1 << 16
_BACKLOG: Final = 10_000
"""Steps that are kept for a file that cannot be written, or for who leads next; of more, the oldest go."""
Numbers = Mapping[str, float | int]


@final
class MetricsFile:
    """`metrics.jsonl` of a run. Each step is in it once, however often the run was interrupted.

    One worker writes, the leading one; the others only remember the last steps, so that whoever leads next
    can add what the last leader did not get to. A step that is in the file already is written again in its
    place, and what comes after it goes: the run went back to a checkpoint. Nothing here fails: what a full
    disk does not take is written once it does.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._last = -1
        self._unwritten: deque[tuple[int, bytes]] = deque(maxlen=_BACKLOG)
        self._fails = False

    def add(self, values: Numbers, *, leads: bool) -> None:
        """The numbers of a step, which `values["step"]` names."""
        step = int(values["step"])
        self._unwritten.append((step, msgspec.json.encode(dict(values)) + b"\n"))
        if not leads:
            self.close()
            return
        try:
            self._write(step)
        except OSError as error:
            self.close()  # and looked at again before the next line: a part of one may be in it
            if not self._fails:
                log.warning("%s cannot be written; training goes on: %s", self._path, error.strerror)
            self._fails = True
        else:
            self._fails = False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._last = self._cut(None)

    def _write(self, newest: int) -> None:
        """Write what waits: up to the newest step what the file does not have, and that one in any case."""
        if self._fd < 0:
            self._open()
        if newest <= self._last:
            self._last = self._cut(newest)
        while self._unwritten:
            step, line = self._unwritten[0]
            if self._last < step <= newest:
                if os.write(self._fd, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._last = step
            self._unwritten.popleft()

    def _cut(self, step: int | None) -> int:
        """Cut off what is not whole, and all from `step` on; the last step that is left, or -1."""
        end = os.fstat(self._fd).st_size
        tail = b""
        while end > 0 or tail:
            at = tail.rfind(b"\n", 0, len(tail) - 1) if tail.endswith(b"\n") else tail.rfind(b"\n")
            if at < 0 and end > len(tail):
                size = min(_CHUNK, end - len(tail))
                tail = os.pread(self._fd, size, end - len(tail) - size) + tail
                continue
            line = tail[at + 1 :]
            found = _step_of(line)
            if found is not None and (step is None or found < step):
                os.ftruncate(self._fd, end)
                return found
            end -= len(line)
            tail = tail[: at + 1]
            if end <= 0:
                break
        os.ftruncate(self._fd, 0)
        return -1


def _step_of(line: bytes) -> int | None:
    """The step of a whole line; None if it is not whole."""
    if not line.endswith(b"\n"):
        return None
    try:
        step = msgspec.json.decode(line)["step"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records of a metrics file, in order; a last line that is not whole is left out."""
    lines = path.read_bytes().splitlines(keepends=True)
    return [msgspec.json.decode(line) for line in lines if _step_of(line) is not None]


def line_of(values: Numbers, total_steps: int) -> str:
    """The numbers of a step as a line for people."""
    parts = [f"step {values['step'] + 1:,}/{total_steps:,}", f"loss {values['loss']:.4f}"]
    parts += [f"rate {values['rate']:.3g}", f"grad norm {values['grad_norm']:.3g}"]
    parts += [f"param norm {values['param_norm']:.4g}", f"{values['tokens_per_s']:,.0f} tokens/s"]
    parts.append(f"{values['tflops']:.3g} TFLOP/s")
    if "mfu" in values:
        parts.append(f"MFU {values['mfu']:.1%}")
    if "memory" in values:
        parts.append(f"{values['memory'] / (1 << 30):.2f} GiB")
    if values.get("skipped"):
        parts.append("SKIPPED: the gradient is not finite")
    if "eval_loss" in values:
        parts.append(f"held-out loss {values['eval_loss']:.4f}")
    return "  ".join(parts)
