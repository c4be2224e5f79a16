"""Lanes of JAX arrays that are folded while the program goes on, and what it may do with them meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.errors import TreeError
from holdfast.jax import ADAPTER
from holdfast.reduce import Reducer

DEADLINE_S: Final = 20.0
SIZE: Final = 2 << 20
"""Floats: two chunks, beside the caller."""


@pytest.fixture
def reducer() -> Iterator[Reducer]:
    found = Reducer(num_lanes=2, num_threads=2)
    found.begin(0, {0: [0, 1]})
    yield found
    found.close()


def deleted(array: Any) -> None:
    array.delete()


def donated(array: Any) -> None:
    jax.jit(lambda given: given * 0 - 1, donate_argnums=0)(array)


def total(reducer: Reducer) -> Any:
    reducer.exchange(DEADLINE_S, lambda: None)
    return reducer.total()["w"]


class Gate:
    """Holds back whoever reads arrays, before or after it has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, after: bool) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self._host, self._after = ADAPTER.host, after
        monkeypatch.setattr(ADAPTER, "host", self._held_back)

    def _held_back(self, leaf: Any, ordinal: int) -> Any:
        found = self._host(leaf, ordinal) if self._after else None
        self.reached.set()
        assert self.opened.wait(DEADLINE_S)
        return found if self._after else self._host(leaf, ordinal)


@pytest.mark.parametrize("end", [deleted, donated])
def test_an_array_that_ends_before_it_is_read_is_an_error(
    reducer: Reducer, end: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    reducer.add(0, {"w": jnp.full(SIZE, 1.0)})
    reducer.held()
    gate, array = Gate(monkeypatch, after=False), jnp.full(SIZE, 2.0)
    reducer.add(1, {"w": array})
    assert gate.reached.wait(DEADLINE_S)
    end(array)
    gate.opened.set()
    with pytest.raises(TreeError, match="was donated or deleted before it was read"):
        total(reducer)
    assert 1 not in reducer.held()


@pytest.mark.parametrize("end", [deleted, donated])
def test_an_array_that_ends_after_it_was_read_is_summed(
    reducer: Reducer, end: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one chunk of it is folded then; its memory must not be used for anything else."""
    reducer.add(0, {"w": jnp.full(SIZE, 1.0)})
    reducer.held()
    gate, array = Gate(monkeypatch, after=True), jnp.full(SIZE, 2.0)
    reducer.add(1, {"w": array})
    assert gate.reached.wait(DEADLINE_S)
    end(array)
    others = [jnp.full(SIZE, 9.0).block_until_ready() for _ in range(4)]
    gate.opened.set()
    assert (total(reducer) == 3.0).all()
    del others


@pytest.mark.parametrize("end", [deleted, donated])
def test_an_array_that_ends_after_the_next_lane_was_added(
    reducer: Reducer, end: Callable[[Any], None]
) -> None:
    first, second = jnp.full(SIZE, 1.0), jnp.full(SIZE, 2.0)
    reducer.add(0, {"w": first})
    reducer.add(1, {"w": second})
    end(first)
    reducer.held()
    end(second)
    assert (total(reducer) == 3.0).all()


def test_an_array_that_ended_before_it_was_added(reducer: Reducer) -> None:
    reducer.add(0, {"w": jnp.full(SIZE, 1.0)})
    gone = jnp.full(SIZE, 2.0)
    gone.delete()
    reducer.add(1, {"w": gone})
    with pytest.raises(TreeError, match="was donated or deleted"):
        reducer.held()


def test_what_a_computation_failed_with_is_told(reducer: Reducer) -> None:
    def fails() -> np.ndarray[Any, np.dtype[np.float32]]:
        raise ZeroDivisionError("the lane computed nonsense")

    shape: Any = jax.ShapeDtypeStruct((SIZE,), jnp.float32)  # type: ignore[no-untyped-call]
    reducer.add(0, {"w": jnp.full(SIZE, 1.0)})
    reducer.held()

    def add() -> None:
        reducer.add(1, {"w": jax.jit(lambda: jax.pure_callback(fails, shape))()})
        reducer.held()

    with pytest.raises(jax.errors.JaxRuntimeError, match="nonsense"):
        add()
    assert 1 not in reducer.held()


LEAVES: Final = """
import atexit, threading
import jax, jax.numpy as jnp
from holdfast.reduce import Reducer

# Handlers that were registered later are called before.
atexit.register(lambda: print(sum("-fold-" in one.name for one in threading.enumerate())))
lane = jax.jit(lambda x: jax.lax.fori_loop(0, 100, lambda _, y: jnp.sin(y) + 1, x))
lane(jnp.zeros(2 << 20)).block_until_ready()
reducer = Reducer(num_lanes=1)
reducer.begin(0, {0: [0]})
reducer.add(0, lane(jnp.ones(2 << 20)))
print("leaving", flush=True)
"""


@pytest.mark.process
def test_a_program_may_end_with_a_lane_on_its_way() -> None:
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=60, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n0\n", "")
