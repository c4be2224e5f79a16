"""A program that ends with copies from a device under way: `python -m tests.jax.staging_exit FOLDER HOW`."""

from __future__ import annotations

import logging
import sys

import jax.numpy as jnp

from holdfast import Checkpointer
from holdfast.jax.staging import DeviceStager, install
from holdfast.testing.cuda import FakeDriver


def main() -> None:
    folder, how = sys.argv[1:]
    logging.basicConfig(level=logging.WARNING)
    driver = FakeDriver()
    install(
        DeviceStager(lambda: driver, platforms=frozenset({"cpu"}), stats=lambda _device: None, drain_s=0.2)
    )
    ckpt = Checkpointer(folder)
    tree = {"x": jnp.arange(3_000_000.0)}
    ckpt.prepare(tree)
    driver.first_copy.clear()
    driver._delay_s = 0.1
    if how == "stuck":
        driver.gate.clear()
    ckpt.save(1, tree, fenced=True)
    if not driver.first_copy.wait(10.0):
        raise SystemExit("no copy began")
    print("leaving", flush=True)
    # No close: the program is over.


if __name__ == "__main__":
    main()
