"""Copies of arrays in the memory of their own device: as fast as that memory, where there is room for them.

The copy is a program like any other. XLA runs the programs of a device in the order they were given to it, so
one that is given a donated array later overwrites it later, and the caller may go on at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, final

import jax
import jax.numpy as jnp

from holdfast.errors import StagingError

_MARGIN: Final = 256 << 20
_SAMPLE: Final = 1 << 20
"""Bytes that are read back by the slow path and compared."""
_MOST: Final = 64
"""The state of a run has one shape on each device; more than this are of trees that will not come back."""

Stats = Mapping[str, int]


@final
class Headroom:
    """Whether a snapshot fits beside what the program needs at its peak. Pure: fed with a device's numbers.

    The allocator's peak is what the largest step needed, once one has run; a snapshot that lived beside it
    is in that peak as well, and is taken out again.
    """

    def __init__(self) -> None:
        self._program = 0
        self._last = 0
        self._with = 0

    def fits(self, stats: Stats | None, nbytes: int) -> bool:
        """Whether `nbytes` more may be taken. Without numbers: no."""
        if not stats or not stats.get("bytes_limit"):
            return False
        in_use, limit = stats.get("bytes_in_use", 0), stats["bytes_limit"]
        peak = max(stats.get("peak_bytes_in_use", in_use), in_use)
        if peak > self._with:  # the program itself has grown, beyond what snapshots explain
            self._program = max(self._program, peak - self._last)
        program = max(self._program, in_use)
        if limit - program < nbytes + _MARGIN:
            return False
        self._last, self._with = nbytes, max(self._with, program + nbytes)
        return True


def memory_stats(device: Any) -> Stats | None:
    """What a device's allocator says of itself; None where it does not."""
    found: Stats | None = device.memory_stats()
    return found


_programs: dict[Hashable, Any] = {}


def _program(kind: Hashable, arrays: Sequence[Any], make: Callable[[], Any]) -> Any:
    """A program for arrays that look like these, compiled once."""
    key = (kind, *((array.shape, array.dtype, array.sharding) for array in arrays))
    if key not in _programs:
        if len(_programs) >= _MOST:
            _programs.clear()
        _programs[key] = make()
    return _programs[key]


def prepare(arrays: Sequence[Any]) -> None:
    """Compile what a snapshot of single-device arrays like these takes."""
    for group in _by_device(arrays).values():
        _copier([arrays[at] for at in group])


def snapshot(arrays: Sequence[Any]) -> list[Any]:
    """Copies of single-device arrays. Does not wait for them. Fails: StagingError, out of memory."""
    found: list[Any] = [None] * len(arrays)
    for group in _by_device(arrays).values():
        mine = [arrays[at] for at in group]
        try:
            made = _copier(mine)(mine)
        except RuntimeError as error:  # JAX's own kind for what the device refuses
            reason = str(error).partition("\n")[0][:200]
            raise StagingError(f"no snapshot on the device: {reason}") from error
        for at, array in zip(group, made, strict=True):
            found[at] = array
    return found


def _copier(arrays: Sequence[Any]) -> Any:
    def copied(given: Sequence[Any]) -> list[Any]:
        return [jnp.copy(array) for array in given]

    return _program("copy", arrays, lambda: jax.jit(copied).lower(arrays).compile())


def _by_device(arrays: Sequence[Any]) -> dict[Any, list[int]]:
    groups: dict[Any, list[int]] = {}
    for at, array in enumerate(arrays):
        (device,) = array.devices()
        groups.setdefault(device, []).append(at)
    return groups


def sample(array: Any, offset: int, nbytes: int) -> tuple[Any, int] | None:
    """A piece out of a single-device array's bytes [offset, offset + nbytes), and where it begins.

    Cut out by a program of the device, to be compared with what was copied. None where there is none to be
    had: indexes are 32 bits wide.
    """
    item = array.dtype.itemsize
    first = -(-offset // item)
    count = min(_SAMPLE // item, (offset + nbytes) // item - first)
    if count <= 0 or first > 2**31 - 1 - count:
        return None

    def cut(whole: Any, at: Any) -> Any:
        return jax.lax.dynamic_slice(whole.reshape(-1), (at,), (count,))

    program = _program(("cut", count), [array], lambda: jax.jit(cut).lower(array, 0).compile())
    return program(array, first), first * item
