"""A jitted function, compiled once for all processes and restarts of a run.

Tracing and lowering are JAX's, and so is everything around the executable: shardings, layouts, donation,
dispatch. Only the one step in the middle, from StableHLO to something that runs, is ours: it takes the bytes
from a bundle where there is a good one. Otherwise it compiles, and past JAX's compile cache: an executable
that came out of that cache cannot be serialised again; the file looks right, loads, and fails when it runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, final

import jax

from holdfast.errors import BundleError, StorageError
from holdfast.xla.bundle import FORMAT, Bundle, Header, Place, check_key, digest
from holdfast.xla.lowering import Compile, compiled_by, leaves, place_of, program_of
from holdfast.xla.shelf import Shelf

log = logging.getLogger("holdfast.xla")

Source = Literal["bundle", "compiler"]

TURN_S: Final = 1800.0
"""How long to wait while another process compiles the same program: as long as a compile may take."""


@final
class Executable:
    """A compiled function; call it like the function, with arguments of the same shapes and shardings."""

    __slots__ = ("_compiled", "digest", "program", "refused", "seconds", "source")

    def __init__(self, compiled: jax.stages.Compiled, made: _Making) -> None:
        self._compiled = compiled
        self.digest: str | None = made.digest
        """Names what runs; None where it cannot be serialised (host callbacks)."""
        self.program: str = made.program
        """Names what was to be compiled."""
        self.source: Source = made.source
        self.refused: str = made.refused
        """Why a bundle that was there was not used; empty if none was."""
        self.seconds: float = made.seconds
        """What the load or the compile took."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)


def compiled(fn: Callable[..., Any], *args: Any, folder: str | Path, key: bytes, name: str) -> Executable:
    """The executable of `fn` for arguments like `args`, out of `folder` if it lies there, else compiled.

    A fresh one is put there for others. `fn` may be jitted, with donation and shardings, which are kept; an
    argument may be an array or a `jax.ShapeDtypeStruct` with a sharding. `key` is the run's; a bundle that it
    did not seal, or that was made for another place, is refused with a warning, and compiled again.

    Blocks: while another process compiles the same program, TURN_S at most. Fails: UsageError; with what JAX
    raises. A folder that cannot be written costs the bundle, not the executable.
    """
    check_key(key)
    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
    lowered = jitted.lower(*args)
    making = _Making(lowered, Shelf(Path(folder)), key, name)
    return Executable(compiled_by(lowered, making.make), making)


@final
class _Making:
    """From StableHLO to something that runs, once."""

    def __init__(self, lowered: jax.stages.Lowered, shelf: Shelf, key: bytes, name: str) -> None:
        self._lowered = lowered
        self._shelf = shelf
        self._key = key
        self._name = name
        self.program = ""
        self.digest: str | None = None
        self.source: Source = "compiler"
        self.refused = ""
        self.seconds = 0.0

    def make(self, task: Compile) -> Any:
        began = time.monotonic()
        self.program = program_of(task)
        place = place_of(task)
        try:
            if task.callbacks or self._lowered_keeps():
                log.warning("%s calls back into Python, so it is not kept in a bundle", self._name)
                return task.compile()
            if place.num_processes > 1 and place.platform != "cpu":
                # Their compilers talk to each other (autotuning): each must compile, or none.
                log.warning(
                    "%s spans %d processes on %s: no bundle", self._name, place.num_processes, place.platform
                )
                return task.compile()
            return self._made(task, place)
        finally:
            self.seconds = time.monotonic() - began

    def _made(self, task: Compile, place: Place) -> Any:
        path = self._shelf.path(self._name, self.program)
        found = self._loaded(path, task, place)
        if found is not None:
            return found
        with self._shelf.turn(self.program, TURN_S) as mine:
            # Somebody may have made it meanwhile.
            found = self._loaded(path, task, place)
            if found is not None:
                return found
            fresh = task.compile()
            payload = task.serialized(fresh)
            self.digest = digest(payload)
            if mine:
                self._store(path, payload, place)
            return fresh

    def _loaded(self, path: Path, task: Compile, place: Place) -> Any | None:
        """The executable of the bundle at `path`; None if there is none, or none that may be loaded."""
        try:
            data = self._shelf.read(path)
            if data is None:
                return None
            bundle = Bundle.opened(data, self._key)
            bundle.check(self.program, place)
            found = task.load(bundle.payload)
        except BundleError as error:
            self._refuse(path, error.message)
            return None
        except jax.errors.JaxRuntimeError as error:
            self._refuse(path, f"the runtime refused the executable: {error}")
            return None
        self.digest = bundle.header.payload_digest
        self.source = "bundle"
        return found

    def _refuse(self, path: Path, reason: str) -> None:
        if reason != self.refused:
            log.warning("%s: %s; it is compiled again", path, reason)
        self.refused = reason

    def _store(self, path: Path, payload: bytes, place: Place) -> None:
        inputs, outputs, donated = leaves(self._lowered)
        header = Header(
            FORMAT, self._name, self.program, place, inputs, outputs, donated, len(payload), digest(payload)
        )
        try:
            self._shelf.write(path, Bundle(header, payload).sealed(self._key))
        except StorageError as error:
            log.warning("the executable of %s is not kept: %s", self._name, error.message)

    def _lowered_keeps(self) -> bool:
        """Whether the program refers to objects of this process."""
        about = getattr(self._lowered, "_lowering").compile_args  # noqa: B009 - private
        return bool(about.get("keepalive") or about.get("host_callbacks"))
