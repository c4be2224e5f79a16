"""Holdfast and its peers behind one protocol: save the state, load it into fresh memory.

Every subject is used as its documentation says, at its defaults. A subject times itself, so that what it
needs only for the benchmark (tensors that share memory with the JAX arrays, old files) stays outside.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

import holdfast
from bench.checkpoint.on_jax import described, ready
from bench.checkpoint.state import Array, nest
from bench.machine import discard

DEADLINE_S = 600.0

Loaded = dict[str, Array]
"""What a load gave, by name, as numpy views; made outside the timing."""


class Subject(Protocol):
    """A checkpointer under test."""

    def save(self) -> tuple[float, float]:
        """Save once; seconds until the call returned, and until the state was durable."""

    def load(self) -> tuple[float, Callable[[], Loaded]]:
        """Load once into fresh memory; seconds, and a way to look at the result."""

    def discard(self) -> None:
        """Remove what the last save wrote, as far as the subject does not do so itself."""

    def close(self) -> None:
        """End threads and processes."""


def _numpy(flat: Mapping[str, Any]) -> Loaded:
    return {name: np.asarray(value) for name, value in flat.items()}


class Holdfast:
    """Holdfast; `recycle` overwrites the file of the pruned step, as a long run does by default."""

    def __init__(self, root: Path, state: Mapping[str, jax.Array], *, recycle: bool) -> None:
        self._root = root
        self._tree = nest(state)
        self._names = list(state)
        self._template = nest(described(state))
        self._ckpt = holdfast.Checkpointer(root, keep=1, recycle=recycle)
        self._ckpt.prepare(self._tree)
        self._step = 0
        self.hash_s = 0.0

    def save(self) -> tuple[float, float]:
        self._step += 1
        started = time.perf_counter()
        handle = self._ckpt.save(self._step, self._tree)
        blocked = time.perf_counter() - started
        handle.durable(DEADLINE_S)
        durable = time.perf_counter() - started
        self._await_pruned()
        return blocked, durable

    def _await_pruned(self) -> None:
        """Pruning runs after the commit on a thread of its own; it must not run into the next measurement."""
        deadline = time.monotonic() + 60.0
        while len([name for name in os.listdir(self._root) if name.startswith("step-")]) > 1:
            if time.monotonic() > deadline:
                raise TimeoutError("the old step was not pruned within 60 s")
            time.sleep(0.005)

    def load(self) -> tuple[float, Callable[[], Loaded]]:
        started = time.perf_counter()
        tree = ready(self._ckpt.load(into=self._template))
        seconds = time.perf_counter() - started
        assert self._ckpt.last_load is not None
        self.hash_s = self._ckpt.last_load.hash_s
        return seconds, lambda: _numpy({name: _leaf(tree, name) for name in self._names})

    def discard(self) -> None:
        """Nothing to do: it prunes."""

    def close(self) -> None:
        self._ckpt.close(60.0)


def _leaf(tree: Any, name: str) -> Any:
    group, _, leaf = name.partition("/")
    return tree[group][leaf]


class Orbax:
    """Orbax's asynchronous StandardCheckpointer at its defaults."""

    def __init__(self, root: Path, state: Mapping[str, jax.Array]) -> None:
        import orbax.checkpoint as ocp

        self._root = root
        root.mkdir()
        self._tree = nest(state)
        self._names = list(state)
        self._template = nest(described(state))
        self._ckpt = ocp.StandardCheckpointer()
        self._step = 0

    @property
    def _path(self) -> Path:
        return self._root / str(self._step)

    def save(self) -> tuple[float, float]:
        self._step += 1
        started = time.perf_counter()
        self._ckpt.save(self._path, self._tree)
        blocked = time.perf_counter() - started
        self._ckpt.wait_until_finished()
        return blocked, time.perf_counter() - started

    def load(self) -> tuple[float, Callable[[], Loaded]]:
        started = time.perf_counter()
        tree = ready(self._ckpt.restore(self._path, self._template))
        seconds = time.perf_counter() - started
        return seconds, lambda: _numpy({name: _leaf(tree, name) for name in self._names})

    def discard(self) -> None:
        discard(self._path)

    def close(self) -> None:
        self._ckpt.close()


class TorchDcp:
    """torch.distributed.checkpoint with FileSystemWriter at its defaults (which syncs files)."""

    def __init__(self, root: Path, state: Mapping[str, jax.Array]) -> None:
        import torch

        self._torch = torch
        self._root = root
        root.mkdir()
        self._step = 0
        self._tensors = {name: self._tensor(np.asarray(array)) for name, array in state.items()}

    def _tensor(self, array: Array) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # views of JAX arrays are read-only; nobody writes to them
            if array.dtype.itemsize == 2:
                return self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16)
            return self._torch.from_numpy(array)

    @property
    def _path(self) -> Path:
        return self._root / str(self._step)

    def save(self) -> tuple[float, float]:
        import torch.distributed.checkpoint as dcp

        self._step += 1
        with _quiet():
            started = time.perf_counter()
            dcp.save(self._tensors, storage_writer=dcp.FileSystemWriter(self._path))
            seconds = time.perf_counter() - started
        return seconds, seconds

    def load(self) -> tuple[float, Callable[[], Loaded]]:
        import torch.distributed.checkpoint as dcp

        with _quiet():
            started = time.perf_counter()
            tensors = {name: self._torch.empty_like(t) for name, t in self._tensors.items()}
            dcp.load(tensors, storage_reader=dcp.FileSystemReader(self._path))
            seconds = time.perf_counter() - started

        def look() -> Loaded:
            as_ints = self._torch.int16
            return {n: (t.view(as_ints) if t.element_size() == 2 else t).numpy() for n, t in tensors.items()}

        return seconds, look

    def discard(self) -> None:
        discard(self._path)

    def close(self) -> None:
        """Nothing runs."""


class Safetensors:
    """safetensors.numpy: save_file and fsync; load_file, to numpy or on to JAX arrays."""

    def __init__(self, root: Path, state: Mapping[str, jax.Array], *, to_jax: bool = False) -> None:
        self._path = root
        self._arrays = _numpy(state)
        self._to_jax = to_jax

    def save(self) -> tuple[float, float]:
        from safetensors.numpy import save_file

        started = time.perf_counter()
        save_file(self._arrays, self._path)
        for path in (self._path, self._path.parent):
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
        seconds = time.perf_counter() - started
        return seconds, seconds

    def load(self) -> tuple[float, Callable[[], Loaded]]:
        from safetensors.numpy import load_file

        started = time.perf_counter()
        arrays: Any = load_file(self._path)
        if self._to_jax:
            arrays = ready({name: jax.device_put(a) for name, a in arrays.items()})
        seconds = time.perf_counter() - started
        return seconds, lambda: _numpy(arrays)

    def discard(self) -> None:
        discard(self._path)

    def close(self) -> None:
        """Nothing runs."""


def peers_installed() -> dict[str, bool]:
    """Which peers can be measured here."""
    return {
        "orbax": find_spec("orbax") is not None and find_spec("orbax.checkpoint") is not None,
        "dcp": find_spec("torch") is not None,
        "safetensors": find_spec("safetensors") is not None,
    }


@contextmanager
def _quiet() -> Iterator[None]:
    # DCP warns at every call that there is one process only.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
