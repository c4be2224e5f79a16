"""What workers find in their environment, and what of jaxlib a world is made of."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.errors import UsageError, WorldError
from holdfast.jax.internals import call, parameters
from holdfast.supervise.environment import COLLECTIVE_TIMEOUT_S, world_environment

TIMEOUT = f"--xla_cpu_collective_timeout_seconds={COLLECTIVE_TIMEOUT_S}"


def test_one_worker() -> None:
    assert world_environment(1, nproc=3, cache=Path("/run/cache"), given={}) == {
        "NPROC": "3",
        "JAX_COMPILATION_CACHE_DIR": "/run/cache",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def test_several_workers_add_a_flag() -> None:
    assert world_environment(2, nproc=1, given={})["XLA_FLAGS"] == TIMEOUT
    given = {"XLA_FLAGS": "--xla_foo=1"}
    assert world_environment(2, nproc=1, given=given)["XLA_FLAGS"] == f"--xla_foo=1 {TIMEOUT}"


def test_what_the_user_set_stands() -> None:
    given = {"XLA_FLAGS": "--xla_cpu_collective_timeout_seconds=5", "NPROC": "7"}
    given["JAX_COMPILATION_CACHE_DIR"] = "/mine"
    assert set(world_environment(2, nproc=1, cache=Path("/x"), given=given)) == {
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
    }


def test_the_default_is_the_cores_there_are() -> None:
    assert world_environment(1, given={}) == {"NPROC": str(len(os.sched_getaffinity(0)))}


@pytest.mark.parametrize(("workers", "nproc"), [(0, 1), (1, 0), (-1, 2)])
def test_counts_below_one(workers: int, nproc: int) -> None:
    with pytest.raises(UsageError, match="must be at least 1"):
        world_environment(workers, nproc=nproc, given={})


def test_parameters_of_a_nanobind_docstring() -> None:
    line = "make(address: str, num_nodes: int, timeout: int | None = None, f: Callable[[int], str]) -> x.Y"
    assert parameters(f"{line}\n\nother: text") == {"address", "num_nodes", "timeout", "f"}


def test_a_jaxlib_that_changed_is_refused_with_a_clear_word() -> None:
    def make(address: str) -> None:
        """make(address: str) -> None"""

    with pytest.raises(WorldError, match="has no make_world"):
        call("make_world", {}, module=SimpleNamespace())
    with pytest.raises(WorldError, match=r"make of jaxlib .* does not take recoverable, token"):
        call("make", {"address": "a", "recoverable": True, "token": 1}, module=SimpleNamespace(make=make))
    call("make", {"address": "a"}, module=SimpleNamespace(make=make))
