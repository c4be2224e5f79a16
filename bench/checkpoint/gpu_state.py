"""The state and the step of the GPU benchmark: bytes to save, and compute to save them under."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

State = list[jax.Array]


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """How large the state is, and how long the part of a step that leaves it alone takes."""

    nbytes: int
    num_arrays: int
    grads_s: float
    width: int
    """Of the matrices that are multiplied meanwhile."""

    @property
    def shape(self) -> tuple[int, int]:
        rows = max(1, self.nbytes // (self.num_arrays * 4 * 1024))
        return rows, 1024


def ready(tree: Any) -> Any:
    """The tree, once all its arrays are computed."""
    return jax.block_until_ready(tree)  # type: ignore[no-untyped-call]


def made(spec: GpuSpec) -> State:
    """The state, random bits on the default device."""

    def one(number: Any) -> Any:
        return jax.random.normal(jax.random.key(number), spec.shape, jnp.float32)

    make = jax.jit(one)
    found: State = [make(number) for number in range(spec.num_arrays)]
    ready(found)
    return found


def described(spec: GpuSpec) -> list[Any]:
    """What a loader is asked for."""
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return [
        jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=place)  # type: ignore[no-untyped-call]
        for _ in range(spec.num_arrays)
    ]


def checksums(state: State) -> list[int]:
    """A sum over the bits of each array that depends on their order, computed where the array is."""

    def mixed(x: Any) -> Any:
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32).reshape(-1)
        weights = jax.lax.iota(jnp.uint32, bits.size) * jnp.uint32(2654435761) + jnp.uint32(1)
        return jnp.sum(bits * weights, dtype=jnp.uint32)

    found = [jax.jit(mixed)(x) for x in state]
    return [int(value) for value in found]


class SplitStep:
    """A step in two programs: `grads` reads the state, `apply` takes it over and changes it."""

    def __init__(self, spec: GpuSpec, state: State, progress: Callable[[str], None]) -> None:
        self.rounds = 1
        self._a = ready(jax.random.normal(jax.random.key(99), (spec.width, spec.width), jnp.bfloat16))
        # A program that knows how often: else it asks the host at every turn whether there is another.
        self._grads = jax.jit(_grads, static_argnums=2)
        self._asking = jax.jit(_grads)
        self._apply = jax.jit(_apply, donate_argnums=0)
        self._fused = jax.jit(_fused, donate_argnums=0, static_argnums=2)
        ready(self.grads(state))
        self._calibrate(spec, state)
        progress(f"a step multiplies {self.rounds} times, {spec.grads_s:g} s wanted")

    def _calibrate(self, spec: GpuSpec, state: State) -> None:
        """Have `grads` take about as long as wanted."""
        while self.rounds < 1 << 20:
            ready(self.grads(state))  # compiled
            seconds = min(_timed(lambda: ready(self.grads(state))) for _ in range(2))
            if seconds >= 0.8 * spec.grads_s:
                return
            self.rounds = max(self.rounds + 1, int(self.rounds * min(8.0, spec.grads_s / max(seconds, 1e-5))))

    def grads(self, state: State) -> Any:
        return self._grads(state[0], self._a, self.rounds)

    def asking(self, state: State) -> Any:
        """The same, by a loop that reads back at every turn whether there is another."""
        return self._asking(state[0], self._a, self.rounds)

    def apply(self, state: State, grads: Any) -> State:
        found: State = self._apply(state, grads)
        return found

    def fused(self, state: State) -> State:
        found: State = self._fused(state, self._a, self.rounds)
        return found


def _grads(first: Any, a: Any, rounds: Any) -> Any:
    seed = jnp.mean(first[:8]).astype(a.dtype)

    def body(_: Any, x: Any) -> Any:
        return (x @ a) / jnp.asarray(a.shape[0], a.dtype) + seed

    return jnp.mean(jax.lax.fori_loop(0, rounds, body, a).astype(jnp.float32))


def _apply(state: State, grads: Any) -> State:
    return [x * 0.999 + grads for x in state]


def _fused(state: State, a: Any, rounds: Any) -> State:
    return _apply(state, _grads(state[0], a, rounds))


def _timed(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def ballast_pieces(stats: Mapping[str, int] | None, nbytes: int) -> list[int]:
    """The sizes of arrays that leave a device half of `nbytes` free: no snapshot, room for temporaries.

    By what is in use now. The peak has snapshots in it that are gone, and filled up to there they would fit.
    """
    if not stats or not stats.get("bytes_limit"):
        return []
    piece = min(1 << 30, max(nbytes // 8, 1 << 20))
    wanted = stats["bytes_limit"] - stats.get("bytes_in_use", 0) - nbytes // 2
    return [piece] * max(0, wanted // piece)


class Ballast:
    """Arrays that leave a device too little memory for a snapshot of the state."""

    def __init__(self, stats: Mapping[str, int] | None, nbytes: int) -> None:
        self._needed = nbytes
        self._arrays = [ready(jnp.zeros(piece, jnp.uint8)) for piece in ballast_pieces(stats, nbytes)]
        self.nbytes: int = sum(array.nbytes for array in self._arrays)

    def checked(self, stats: Mapping[str, int] | None) -> int:
        """The bytes that it takes. Fails: RuntimeError if a snapshot would fit beside it."""
        if stats and stats.get("bytes_limit"):
            free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
            if free >= self._needed + (256 << 20):
                raise RuntimeError(f"{free:,} bytes are free beside the ballast: a snapshot fits")
        return self.nbytes

    def drop(self) -> None:
        """Make room again."""
        self._arrays.clear()
