"""A page of memory that a worker shares with its agent: where the worker is, told without a system call.

The worker writes with a few stores; its agent reads whenever it likes, also while the worker is stopped,
holds the interpreter's lock or is dead. There is no lock: a counter that is odd during a write tells the
reader to look again. Times are CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import mmap
import os
import statistics
import struct
import time
from collections.abc import Callable
from typing import Final, NamedTuple, Self, final

NO_STEP: Final = -1
"""The step of a worker that has done none in its life."""
PHASES: Final = (
    "start",
    "import",
    "init",
    "compile",
    "restore",
    "step",
    "save",
    "eval",
    "shutdown",
    "parked",
)
_BYTES: Final = mmap.PAGESIZE
# Native sizes, each at its own alignment: one store each, so that no reader sees half a number.
_COUNTER: Final = struct.Struct("@Q")
_INTEGER: Final = struct.Struct("@q")
_TIME: Final = struct.Struct("@d")
_SEQ, _STEP, _PHASE_SINCE, _PROGRESSED_AT, _WAITING_SINCE, _PULSED_AT, _NUM_STEPS = range(0, 56, 8)
_PHASE: Final = 64
_PHASE_BYTES: Final = 32
_WAITING: Final = 96
_WAITING_BYTES: Final = 96
_LENGTHS: Final = 256
_NUM_LENGTHS: Final = 32
_TRIES: Final = 8


class Reading(NamedTuple):
    """Where a worker is. `waiting` names the Holdfast call in which it waits for others, "" for none."""

    step: int
    phase: str
    phase_since: float
    progressed_at: float
    waiting: str
    median_step_s: float
    """Of the last 32 steps; 0.0 before the second."""
    num_steps: int = 0
    """Steps of this life."""
    waiting_since: float = 0.0
    pulsed_at: float = 0.0
    """When the wait last said that it goes on; `waiting_since` if it never did."""


def make_board() -> int:
    """A new board: the descriptor of a memfd, closed on exec unless it is passed on."""
    fd = os.memfd_create("holdfast-board", os.MFD_CLOEXEC)
    os.ftruncate(fd, _BYTES)
    return fd


@final
class Board:
    """The worker's side. Never fails and never blocks."""

    def __init__(self, page: mmap.mmap, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._page = page
        self._monotonic = monotonic
        self._phase = "start"
        self._compiling = False
        self._waiting = ""
        self._progressed_at = 0.0
        self._num_steps = 0
        (self._seq,) = _COUNTER.unpack_from(page, _SEQ)

    @classmethod
    def open(cls, fd: int) -> Self:
        """The board behind an inherited descriptor, which is closed."""
        page = mmap.mmap(fd, _BYTES)
        os.close(fd)
        return cls(page)

    def progress(self, step: int) -> None:
        """`step` steps of the run are done."""
        now = self._monotonic()
        page, before = self._page, self._progressed_at
        self._begin()
        if before:
            at = _LENGTHS + 8 * (self._num_steps % _NUM_LENGTHS)
            _TIME.pack_into(page, at, now - before)
            self._num_steps += 1
            _COUNTER.pack_into(page, _NUM_STEPS, self._num_steps)
        _INTEGER.pack_into(page, _STEP, step + 1)
        _TIME.pack_into(page, _PROGRESSED_AT, now)
        self._progressed_at = now
        self._end()

    def phase(self, name: str) -> str:
        """Enter a phase; gives the one before it, to go back to."""
        before, self._phase = self._phase, name
        self._show_phase()
        return before

    def compiling(self, now: bool) -> None:
        """Be in the phase "compile" for as long as something compiles, on whichever thread, and then again
        in the one that was entered last, be it meanwhile.
        """
        self._compiling = now
        self._show_phase()

    def _show_phase(self) -> None:
        self._begin()
        _text(self._page, _PHASE, _PHASE_BYTES, "compile" if self._compiling else self._phase)
        _TIME.pack_into(self._page, _PHASE_SINCE, self._monotonic())
        self._end()

    def waiting(self, name: str | None) -> None:
        """Wait for others in the Holdfast call `name`; None: no more. The same name again: the wait goes on.

        A wait that said so once must go on saying so: one that falls silent is taken for a hang.
        """
        now = self._monotonic()
        page = self._page
        self._begin()
        if name and name == self._waiting:
            _TIME.pack_into(page, _PULSED_AT, now)
        else:
            _text(page, _WAITING, _WAITING_BYTES, name or "")
            _TIME.pack_into(page, _WAITING_SINCE, now)
            _TIME.pack_into(page, _PULSED_AT, now)
            self._waiting = name or ""
        self._end()

    def _begin(self) -> None:
        # Odd and then even again, whatever another thread did in between.
        self._seq |= 1
        _COUNTER.pack_into(self._page, _SEQ, self._seq)

    def _end(self) -> None:
        self._seq = (self._seq | 1) + 1
        _COUNTER.pack_into(self._page, _SEQ, self._seq)


@final
class BoardReader:
    """The agent's side. `since` is when the worker was started, for a board that nobody has written on."""

    def __init__(self, fd: int, *, since: float = 0.0) -> None:
        self._page = mmap.mmap(fd, _BYTES, prot=mmap.PROT_READ)
        self._since = since

    def read(self) -> Reading:
        """What stands on the board. A worker that died in the middle of a write is read as it is."""
        data = b""
        for _ in range(_TRIES):
            (before,) = _COUNTER.unpack_from(self._page, _SEQ)
            data = self._page[:]
            if before % 2 == 0 and _COUNTER.unpack_from(self._page, _SEQ)[0] == before:
                break
        return self._reading(data)

    def _reading(self, data: bytes) -> Reading:
        (num_steps,) = _COUNTER.unpack_from(data, _NUM_STEPS)
        lengths = struct.unpack_from(f"@{min(num_steps, _NUM_LENGTHS)}d", data, _LENGTHS)
        (step,) = _INTEGER.unpack_from(data, _STEP)
        return Reading(
            step=step - 1,
            phase=_read_text(data, _PHASE, _PHASE_BYTES) or "start",
            phase_since=_TIME.unpack_from(data, _PHASE_SINCE)[0] or self._since,
            progressed_at=_TIME.unpack_from(data, _PROGRESSED_AT)[0],
            waiting=_read_text(data, _WAITING, _WAITING_BYTES),
            median_step_s=statistics.median(lengths) if lengths else 0.0,
            num_steps=num_steps,
            waiting_since=_TIME.unpack_from(data, _WAITING_SINCE)[0],
            pulsed_at=_TIME.unpack_from(data, _PULSED_AT)[0],
        )

    def close(self) -> None:
        """Give the page back."""
        self._page.close()


def _text(page: mmap.mmap, at: int, room: int, text: str) -> None:
    page[at : at + room] = text.encode(errors="replace")[:room].ljust(room, b"\0")


def _read_text(data: bytes, at: int, room: int) -> str:
    return data[at : at + room].rstrip(b"\0").decode(errors="replace")
