"""A trainer with a mirror, as a process of its own; reports what it sees in JSON lines.

    python -m tests.vault.mirroring ROOT MIRROR [--steps 3] [--then close] ...

The state of a step is that of `tests.checkpoint.trainer`.
"""

from __future__ import annotations

import argparse
import time

from holdfast.checkpoint import Checkpointer, Mirror
from holdfast.errors import HoldfastError
from tests.checkpoint.trainer import SIZE, await_line, forget_faults_after_spawn, report, state


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("mirror")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--size", type=int, default=SIZE)
    parser.add_argument("--writer", default="vault")
    parser.add_argument("--drain", type=float, default=60.0)
    parser.add_argument("--arm-vaults", type=int, default=2, help="1: only the first vault gets the faults")
    parser.add_argument("--wait", choices=("durable", "mirrored"), default="mirrored")
    parser.add_argument("--then", choices=("close", "wait"), default="close")
    options = parser.parse_args()
    if options.arm_vaults == 1:
        forget_faults_after_spawn()
    mirror = Mirror(options.mirror, keep=None, drain_s=options.drain)
    ckpt = Checkpointer(options.root, mirror=mirror, keep=None, writer=options.writer, deadline_s=60.0)
    ckpt.prepare(state(0, options.size))
    report("ready", vault=ckpt.vault_pid)
    for step in range(options.first, options.first + options.steps):
        began = time.monotonic()
        handle = ckpt.save(step, state(step, options.size))
        handle.durable(60.0)
        report("durable", step=step, seconds=time.monotonic() - began)
        if options.wait == "mirrored":
            try:
                handle.mirrored(60.0)
                report("mirrored", step=step, vault=ckpt.vault_pid)
            except HoldfastError as error:
                report("failed", step=step, message=error.message)
    if options.then == "wait":
        report("waiting")
        await_line()
    ckpt.close()
    report("closed")


if __name__ == "__main__":
    main()
