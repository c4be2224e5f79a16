"""A small trainer, run as a process of its own: saves steps and reports what it sees in JSON lines.

    python -m tests.checkpoint.trainer ROOT [--steps 3] [--then close] ...

The state of a step is a pure function of its number, so that whoever loads it knows what must be there. It
is overwritten in place after every save: a save that is not a copy shows at once.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import threading
from typing import Any

import numpy as np

from holdfast import faults
from holdfast.checkpoint import Checkpointer, SaveHandle
from holdfast.errors import HoldfastError

SIZE = 20 << 20
"""Two and a half blocks: every fault site is met at least once in a save."""


def state(step: int, size: int = SIZE) -> dict[str, Any]:
    """What a trainer holds after `step`."""
    base = np.arange(size // 4, dtype=np.uint32)
    return {
        "params": {"w": base * np.uint32(2654435761) + np.uint32(step), "b": np.full(3, step, np.float32)},
        "opt": {"count": step, "scale": 0.5 * step},
    }


def advance(tree: dict[str, Any], step: int) -> None:
    """Make the state that of `step`, in the same memory."""
    new = state(step, tree["params"]["w"].nbytes)
    tree["params"]["w"][:] = new["params"]["w"]
    tree["params"]["b"][:] = new["params"]["b"]
    tree["opt"] = new["opt"]


def same(tree: dict[str, Any], step: int, size: int = SIZE) -> bool:
    """Whether a loaded tree is the state of `step`, to the bit."""
    want = state(step, size)
    return (
        tree["opt"] == want["opt"]
        and np.array_equal(tree["params"]["w"], want["params"]["w"])
        and np.array_equal(tree["params"]["b"], want["params"]["b"])
    )


def report(saw: str, **fields: object) -> None:
    # One write: the lines of several threads must not mix.
    os.write(1, json.dumps({"saw": saw, **fields}).encode() + b"\n")


def watch(handle: SaveHandle) -> None:
    """Report what becomes of a save."""
    try:
        handle.staged(60.0)
        report("staged", step=handle.step)
        handle.durable(60.0)
        report("durable", step=handle.step)
    except HoldfastError as error:
        report("failed", step=handle.step, error=type(error).__name__, message=error.message)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--size", type=int, default=SIZE)
    parser.add_argument("--keep", type=int)
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--writer", default="vault")
    parser.add_argument("--deadline", type=float, default=60.0)
    parser.add_argument("--then", choices=("close", "exit", "raise", "wait", "terminate"), default="close")
    parser.add_argument("--arm-vaults", type=int, default=0, help="how many vaults inherit the faults")
    parser.add_argument("--ask", action="store_true", help="wait for a line before each save")
    parser.add_argument("--loose", action="store_true", help="do not wait for a save before the next")
    options = parser.parse_args()
    # Only the first vaults are to fail, or no save would ever succeed.
    spec = os.environ.get(faults.ENV, "") if options.arm_vaults else ""
    if options.arm_vaults == 1:
        forget_faults_after_spawn()
    ckpt = Checkpointer(
        options.root,
        keep=options.keep,
        slots=options.slots,
        writer=options.writer,
        deadline_s=options.deadline,
    )
    tree = state(0, options.size)
    ckpt.prepare(tree)
    report("ready", vault=ckpt.vault_pid, faults=spec)
    watchers = []
    for step in range(options.first, options.first + options.steps):
        if options.ask:
            sys.stdin.readline()
        advance(tree, step)
        handle = ckpt.save(step, tree, meta={"samples": 10 * step})
        report("captured", step=step)
        advance(tree, 1_000_000 + step)  # must not be seen in the save
        watcher = threading.Thread(target=watch, args=[handle], daemon=True)
        watcher.start()
        watchers.append(watcher)
        if not options.loose:
            watcher.join(120.0)
    end(ckpt, watchers, options.then)


def forget_faults_after_spawn() -> None:
    """Take the faults out of the environment once the first vault has got them."""
    from holdfast.vault import client

    spawn = client.VaultWriter._spawn

    def once(self: client.VaultWriter) -> Any:
        try:
            return spawn(self)
        finally:
            os.environ.pop(faults.ENV, None)

    client.VaultWriter._spawn = once  # type: ignore[method-assign]


def await_line() -> None:
    """Wait for a line or a signal.

    A plain read can sleep through a signal: one that comes after Python's last look for signals and before
    the system call interrupts nothing, and its handler runs when the read ends. The wake-up descriptor has no
    such gap.
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    select.select([sys.stdin, woken], [], [])
    sys.stdin.readline()


def end(ckpt: Checkpointer, watchers: list[threading.Thread], how: str) -> None:
    match how:
        case "close":
            for watcher in watchers:
                watcher.join(120.0)
            ckpt.close()
            report("closed")
        case "exit":
            report("leaving")
        case "raise":
            raise RuntimeError("the training failed")
        case "wait":
            report("waiting")
            await_line()
            ckpt.close()
            report("closed")
        case "terminate":
            os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
