"""What is to go wrong in a run, and exactly where: each mishap happens once, to whom it is meant for.

A test gives a list of them to the trainer. Each names a point of the trainer ("import", "rehearse", "init",
"lane", "apply", "end", "exit") or a fault site of Holdfast; a worker that comes by there, in the right slot
and step, claims the mishap by a file and lets it happen, to itself or to another process of the run.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn, final

import msgspec

from holdfast import faults
from holdfast.coord import threaded
from holdfast.journal import WorkerSpawned, read
from holdfast.supervise.processes import is_alive, marked
from holdfast.supervise.roster import READY
from holdfast.supervise.status import STATUS_FILE, RunStatus

ENV: Final = "RECOVERY_MISHAPS"
_LOOK_S: Final = 0.02
_FIND_S: Final = 20.0


class Mishap(msgspec.Struct, frozen=True, kw_only=True):
    """`what` happens to `who` as soon as somebody comes by `at`. -1: in any slot, at any step, after nothing.

    `who`: self, coordinator, vault, agent, parked, or slot:N. `after` is the number of a mishap that must
    have happened before. One that is `always` to happen spares nobody. `told` holds it back until the journal
    has so many events of a kind and a step: (kind, step, count). At a "gate" a worker waits for `open_gate`.
    """

    at: str
    what: str
    who: str = "self"
    slot: int = -1
    step: int = -1
    after: int = -1
    always: bool = False
    told: tuple[str, int, int] | None = None


def encoded(mishaps: tuple[Mishap, ...]) -> str:
    """For the environment of a run."""
    return msgspec.json.encode(mishaps).decode()


@final
class Plan:
    """The mishaps of a run, as one of its workers sees them. It takes the place of the armed fault sites."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._mishaps = msgspec.json.decode(os.environ.get(ENV, "[]"), type=tuple[Mishap, ...])
        self.slot = self.step = -1

    def install(self) -> None:
        """Hear of the fault sites of this process."""
        if self._mishaps:
            faults._armed = self  # type: ignore[assignment]
            for what, number in _ORDERS.items():
                signal.signal(number, lambda *_, what=what: _TO_SELF[what]())

    def hit(self, name: str) -> None:
        """Somebody came by here."""
        for number, one in enumerate(self._mishaps):
            if name == one.at and one.slot in (-1, self.slot) and one.step in (-1, self.step):
                waits = one.after >= 0 and not happened(self._out, one.after)
                if not waits and (self._claim(number) or one.always):
                    self._act(number, one)

    def _claim(self, number: int) -> bool:
        try:
            _trace(self._out, number).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _act(self, number: int, one: Mishap) -> None:
        if one.told is not None:
            _until_told(*one.told)
        pids = [] if one.who == "self" else _found(one.who)
        os.utime(_trace(self._out, number))
        if one.what == "gate":
            _await(lambda: _gate(self._out, number).exists(), f"open gate {number}")
        elif one.who == "self":
            _TO_SELF[one.what]()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, (_SIGNALS | _ORDERS)[one.what])


def happened(out: Path, number: int) -> bool:
    """Whether a mishap has happened."""
    return _trace(out, number).exists()


def moment(out: Path, number: int) -> float:
    """When it happened, in wall time. Fails: OSError if it did not."""
    return _trace(out, number).stat().st_mtime


def open_gate(out: Path, number: int) -> None:
    """Let whoever was stopped by the mishap "gate" go on."""
    _gate(out, number).touch()


def _trace(out: Path, number: int) -> Path:
    return out / f"mishap-{number}"


def _gate(out: Path, number: int) -> Path:
    return out / f"gate-{number}"


# ---- to oneself


def lock_interpreter() -> NoReturn:
    """Hold the interpreter's lock for ever; signals wake a sleeping process up."""
    while True:
        ctypes.PyDLL(None).sleep(600)


def cut_links() -> None:
    """Lose the coordinator, for good, as when a cable is pulled: this process goes on and hears nothing."""

    def unreachable(*given: object) -> NoReturn:
        raise OSError("the link is cut")

    threaded.__dict__["connected"] = unreachable
    for engine in threaded._engines:
        if engine._sock is not None:
            engine._sock.shutdown(socket.SHUT_RDWR)


def spin() -> NoReturn:
    while True:
        pass


def hog() -> NoReturn:
    """Take memory until there is no more."""
    taken = []
    while True:
        taken.append(b"x" * (64 << 20))


def fail() -> NoReturn:
    raise RuntimeError("the loss is not a number")


def _signal(number: signal.Signals) -> Callable[[], None]:
    # To the calling thread: it must not go on while another takes the signal.
    return lambda: signal.raise_signal(number)


def _exit(code: int) -> Callable[[], object]:
    return lambda: sys.exit(code)


_SIGNALS: Final = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "segv": signal.SIGSEGV,
    "term": signal.SIGTERM,
    # What the kernel does; that it was for want of memory is told by a counter that nobody here can write.
    "oom": signal.SIGKILL,
}

# By these one process tells another what is to befall it; its main thread obeys, also one that is parked.
_ORDERS: Final = {
    what: signal.SIGRTMIN + number for number, what in enumerate(("exit1", "raise", "gil", "spin"), 1)
}

_TO_SELF: Final[dict[str, Callable[[], object]]] = {
    **{name: _signal(number) for name, number in _SIGNALS.items()},
    "segv": lambda: ctypes.string_at(0),
    "exit1": _exit(1),
    "exit75": _exit(75),
    "exit78": _exit(78),
    "raise": fail,
    # So long that whatever others do meanwhile is done.
    "nap": lambda: time.sleep(1.0),
    "hold": lambda: _until_stopping(),
    "cut": cut_links,
    "gil": lock_interpreter,
    "spin": spin,
    "hog": hog,
}


# ---- when the time has come


def _until_told(kind: str, step: int, count: int) -> None:
    """Wait until the journal has so many events of a kind and a step. Fails: AssertionError."""
    path = Path(os.environ["HOLDFAST_FOLDER"]) / "journal.jsonl"

    def told(event: object) -> bool:
        return type(event).__name__ == kind and getattr(event, "step", None) == step

    _await(
        lambda: sum(told(one.event) for one in read(path)) >= count, f"{count} times {kind} of step {step}"
    )


def _until_stopping() -> None:
    """Wait until the run knows that it has to stop. Fails: AssertionError."""
    path = Path(os.environ["HOLDFAST_FOLDER"]) / STATUS_FILE

    def stops() -> bool:
        with suppress(OSError):
            return msgspec.json.decode(path.read_bytes(), type=RunStatus).state in ("stopping", "ended")
        return False

    _await(stops, "sign that the run stops")


def _await(there: Callable[[], object], what: str) -> None:
    ends = time.monotonic() + _FIND_S
    while not there():
        assert time.monotonic() < ends, f"there is no {what} in {_FIND_S:g} s"
        time.sleep(_LOOK_S)


# ---- to others


def _found(who: str) -> list[int]:
    """The processes of this run that are meant. Blocks: until there is one. Fails: AssertionError."""
    found: list[int] = []
    folder = Path(os.environ["HOLDFAST_FOLDER"])

    def look() -> bool:
        found[:] = _look(who, folder)
        return bool(found)

    _await(look, who)
    return found


def _look(who: str, folder: Path) -> list[int]:
    if who == "agent":
        return [os.getppid()]
    if who in ("coordinator", "vault"):
        return [pid for pid, _ in marked({"HOLDFAST_FOLDER": str(folder), "HOLDFAST_PART": who})]
    try:
        status = msgspec.json.decode((folder / STATUS_FILE).read_bytes(), type=RunStatus)
    except OSError:
        return []
    if who == "parked":
        spawned = [
            one.event for one in read(folder / "journal.jsonl") if isinstance(one.event, WorkerSpawned)
        ]
        pids = {one.worker: one.pid for one in spawned}
        ready = [pids.get(one.worker, 0) for one in status.parked if one.state == READY]
        return [pid for pid in ready if pid and _lives(pid)]
    slot = int(who.removeprefix("slot:"))
    return [seat.pid for seat in status.seats if seat.slot == slot and seat.pid]


def _lives(pid: int) -> bool:
    with suppress(OSError):
        fd = os.pidfd_open(pid)
        try:
            return is_alive(fd)
        finally:
            os.close(fd)
    return False
