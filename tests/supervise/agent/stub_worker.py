"""A worker without training: it speaks a worker's side of the control socket and then does what it was told.

stub_worker.py MODE

The coordinator is that of its agent, or the one whose address is in the variable STUB_COORD.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from holdfast.coord import CoordClient, threaded
from holdfast.errors import CoordError, UsageError
from holdfast.supervise import lives
from holdfast.supervise.board import Board
from holdfast.supervise.messages import Active, Drained, Finished, Leave, Order, StopRun, Take, Waiting
from holdfast.supervise.stacks import SIGNAL, stacks_path
from holdfast.supervise.stream import Stream, inherited, orders_of


def steps(board: Board, stream: Stream[Order], *, mute: bool = False) -> int:
    """Train until told otherwise."""
    step = 0
    while True:
        step += 1
        board.progress(step)
        time.sleep(0.01)
        for order in stream.take():
            if isinstance(order, Leave):
                if not mute:
                    stream.send(Drained())
                return 0
            if isinstance(order, StopRun):
                print(f"saved and stopped: {order.reason}", flush=True)
                return 0


def lock_interpreter() -> None:
    """Sleep in C with the interpreter's lock held: no Python code runs in this process any more."""
    library = ctypes.PyDLL(None)
    while True:
        # Signals wake it up.
        library.sleep(600)


def spin() -> None:
    while True:
        pass


def doze() -> None:
    threading.Event().wait(600)


def use_up_memory() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    print("now it fails", flush=True)
    raise RuntimeError("the loss is not a number")


def cut_links() -> None:
    """Lose the coordinator, for good, as when a cable is pulled: this process goes on and hears nothing."""

    def unreachable(*given: object) -> NoReturn:
        raise OSError("the link is cut")

    threaded.__dict__["connected"] = unreachable
    for engine in threaded._engines:
        if engine._sock is not None:
            engine._sock.shutdown(socket.SHUT_RDWR)


ACTS: dict[str, Callable[[], object]] = {
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "kill": use_up_memory,
    "stop": lambda: signal.raise_signal(signal.SIGSTOP),
    "exit75": lambda: sys.exit(75),
    "raise": fail,
    "done": lambda: sys.exit(0),
    "gil": lock_interpreter,
    "spin": spin,
    "doze": doze,
    "cut": cut_links,
}


def main() -> int:
    mode = sys.argv[1]
    folder = os.environ["HOLDFAST_FOLDER"]
    with os.fdopen(int(os.environ["HOLDFAST_TOKEN_FD"]), "rb") as file:
        token = file.read()
    path = stacks_path(folder, os.getpid())
    os.makedirs(os.path.dirname(path), exist_ok=True)
    faulthandler.register(SIGNAL, file=open(path, "a"), all_threads=True)  # noqa: SIM115
    board = Board.open(int(os.environ["HOLDFAST_BOARD_FD"]))
    stream = orders_of(inherited(int(os.environ["HOLDFAST_CONTROL_FD"])))
    if mode == "early":
        fail()
    if mode == "unjoined":
        print("no part in anything")
        return 0
    board.phase("parked")
    stream.send(Waiting())
    if mode == "deaf":
        lock_interpreter()
    take = stream.receive(600.0)
    board.phase("init")
    assert isinstance(take, Take)
    slot = take.seat.replica * take.workers_per_replica + take.seat.index
    print(f"slot {slot} of {take.replicas}, NPROC {os.environ['NPROC']}, nice {os.nice(0)}", flush=True)
    if mode == "offspring":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"offspring {child.pid}", flush=True)
    address = os.environ.get("STUB_COORD") or os.environ["HOLDFAST_COORD"]
    client = CoordClient(address, run=os.environ["HOLDFAST_RUN"], token=token)
    lives.declare(client, 0)
    board.waiting("join")
    joined = client.join(slot=slot, timeout_s=60.0)
    board.waiting(None)
    board.phase("step")
    for step in range(4):
        board.progress(step)
    stream.send(Active(client.incarnation, joined.slot, joined.generation))
    if mode == "part":
        while not client.status().watches:  # the agent's: it is to hear of it
            time.sleep(0.01)
        lives.part(client, 0)
        client.close()
    if mode == "finished":  # and the coordinator was away when it parted
        stream.send(Finished())
        cut_links()
    ends, _, act = mode.rpartition("-")
    if ends:
        stream.send(Finished())
        board.phase("shutdown")
    if act in ACTS:
        ACTS[act]()
    code = steps(board, stream, mute=mode == "mute")
    with contextlib.suppress(CoordError, UsageError):  # of one that has parted
        client.leave("stopped", timeout_s=1.0)
    return code


if __name__ == "__main__":
    sys.exit(main())
