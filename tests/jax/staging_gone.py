"""A program that gives its arrays away before the fence: `python -m tests.jax.staging_gone HOW TRIES`."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from holdfast.arrays import flatten_tree
from holdfast.checkpoint.captures import split
from holdfast.checkpoint.saving import SavePlanner
from holdfast.clock import Deadline
from holdfast.errors import TreeError
from holdfast.jax.shards import nobody
from holdfast.jax.staging import DeviceStager, install
from holdfast.testing.cuda import FakeDriver
from holdfast.vault import Slot

P: Any = jax.sharding.PartitionSpec  # shipped without types

compute = jax.jit(lambda tree, n: jax.lax.fori_loop(0, n, lambda _, now: jax.tree.map(jnp.cos, now), tree))
donate = jax.jit(lambda tree: jax.tree.map(jnp.cos, tree), donate_argnums=0)


def delete(tree: dict[str, Any]) -> None:
    for array in tree.values():
        array.delete()


def main() -> None:
    ways: dict[str, Callable[[dict[str, Any]], Any]] = {"delete": delete, "donate": donate}
    give_away, tries = ways[sys.argv[1]], int(sys.argv[2])
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    zeros = jnp.zeros(64 * mesh.size)
    first = {
        name: jax.device_put(zeros, jax.sharding.NamedSharding(mesh, spec))
        for name, spec in (("cut", P("x")), ("replicated", P()))
    }
    flat = flatten_tree(first)
    plan = SavePlanner(0, 1).plan(flat)
    # Read by JAX: the driver that is none reads host memory, which is unmapped when an array is deleted.
    install(DeviceStager(FakeDriver, platforms=frozenset({"cpu"}), first=2, stats=lambda _device: None))
    found = split(plan, flat.leaves)
    assert found.stager is not None
    memory, chance, saved = Slot.make(plan.size), random.Random(7), 0

    def later(tree: dict[str, Any], turns: int) -> Any:
        for _ in range(turns):
            pass
        return give_away(tree)

    sys.setswitchinterval(1e-5)  # so that threads meet everywhere
    with ThreadPoolExecutor(1) as pool:
        for _ in range(tries):
            # Some go while they are computed, some while they are copied, some after that.
            tree = compute(first, chance.choice((0, 0, 1000)))
            going = pool.submit(later, tree, chance.randrange(20_000))
            with suppress(TreeError):
                copying = found.stager.begin(flatten_tree(tree).leaves, found.device, memory, fenced=True)
                copying.run(nobody, threading.Event(), Deadline(60.0))
                saved += 1
            going.result(60.0)
    print(f"{saved} of {tries} were saved before")


if __name__ == "__main__":
    main()
