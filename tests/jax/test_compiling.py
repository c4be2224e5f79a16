"""The watch on compiles, and how supervision finds it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from holdfast.errors import UsageError
from holdfast.jax import abstract_mesh
from holdfast.supervise import hooks
from holdfast.supervise.messages import Seat


@pytest.fixture
def seen() -> Iterator[list[str]]:
    found: list[str] = []
    assert hooks.watch_compiles(lambda: found.append("enter"), lambda: found.append("leave"))
    yield found
    hooks.watch_compiles(lambda: None, lambda: None)


def paired(seen: list[str]) -> bool:
    return seen == ["enter", "leave"] * (len(seen) // 2)


def test_a_compile_is_entered_and_left(seen: list[str]) -> None:
    x = jnp.arange(7.0)
    seen.clear()
    inside: list[str] = []

    @jax.jit
    def f(x: jax.Array) -> jax.Array:
        inside.extend(seen)  # runs while it is traced
        y: jax.Array = jax.jit(jnp.sin)(x)
        return y * 3.0

    f(x)
    assert inside == ["enter"]
    assert seen
    assert paired(seen)
    seen.clear()
    f(x)
    assert seen == []


def test_one_that_fails_is_left_too(seen: list[str]) -> None:
    x = jnp.arange(3.0)
    seen.clear()

    @jax.jit
    def wrong(x: jax.Array) -> jax.Array:
        raise RuntimeError("in the trace")

    with pytest.raises(RuntimeError, match="in the trace"):
        wrong(x)
    assert seen == ["enter", "leave"]


def test_compiles_on_several_threads_are_one(seen: list[str]) -> None:
    x = jnp.arange(3.0)
    seen.clear()
    meet = threading.Barrier(2)

    def work(factor: float) -> None:
        @jax.jit
        def f(x: jax.Array) -> jax.Array:
            meet.wait(20.0)
            return x * factor

        f(x)

    threads = [threading.Thread(target=work, args=(n + 2.5,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert paired(seen)


def test_a_later_pair_replaces_the_first(seen: list[str]) -> None:
    later: list[str] = []
    hooks.watch_compiles(lambda: later.append("enter"), lambda: later.append("leave"))
    x = jnp.arange(5.0)
    seen.clear()
    jax.jit(lambda x: x * 17.5)(x)
    assert seen == []
    assert paired(later)
    assert later


def test_a_world_needs_a_framework_without_devices() -> None:
    jax.devices()
    seat = Seat(0, 0, 0)
    nobody: Any = None
    info = hooks.RunInfo("demo", Path("/tmp"), 0)
    with pytest.raises(UsageError, match="JAX has devices already"):
        hooks.start_world(nobody, seat, 2, info)
    with pytest.raises(UsageError, match="no support for the framework 'abacus'"):
        hooks.start_world(nobody, seat, 2, info, framework="abacus")
    hooks.start_world(nobody, seat, 1, info)()


def test_what_was_traced_for_an_abstract_mesh_is_found_on_a_real_one() -> None:
    traces: list[str] = []

    @jax.jit
    def f(x: jax.Array) -> jax.Array:
        traces.append("traced")
        return x * 2.0

    struct: Any = jax.ShapeDtypeStruct
    P: Any = jax.sharding.PartitionSpec
    spec = P("x")
    f.trace(struct((8,), np.float32, sharding=NamedSharding(abstract_mesh({"x": 4}), spec)))
    assert traces == ["traced"]
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    found = f(jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, spec)))
    assert found.tolist() == [2.0] * 8
    assert traces == ["traced"]
