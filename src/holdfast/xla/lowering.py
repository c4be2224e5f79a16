"""The private parts of JAX between a lowered function and a compiled one; all of them are in this file.

JAX compiles in one place, `jax._src.compiler.compile_or_get_cached`. A wrapper stands there from the first
use on: it asks this thread's maker, if there is one, and else does what was there before. The names and
arguments are the same in 0.10 and 0.11; other versions are refused by `_check`.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import io
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias, cast, final

import jax
import jaxlib.version
from jax._src import compiler
from jaxlib.mlir import ir, passmanager

from holdfast.errors import BundleError
from holdfast.jax.world import cpu_features
from holdfast.xla.bundle import Leaf, Place

_ARGUMENTS: Final = (
    "backend",
    "computation",
    "devices",
    "compile_options",
    "host_callbacks",
    "executable_devices",
)
_PASSING: Final = {
    "xla_dump_to": "",
    "xla_gpu_experimental_autotune_cache_mode": 0,  # differs between the processes of a world
    "xla_gpu_kernel_cache_file": "",
    "xla_gpu_per_fusion_autotune_cache_dir": "",
}
"""Options that say where files go, and change nothing of what is compiled."""

_original: Final[Callable[..., Any]] = compiler.compile_or_get_cached


@final
class Compile:
    """What JAX asks to be compiled."""

    def __init__(
        self, backend: Any, module: Any, options: Any, callbacks: Sequence[Any], devices: Any
    ) -> None:
        self.backend = backend
        self.module = module
        self.options = options
        self.callbacks = tuple(callbacks)
        self.devices = devices

    def compile(self) -> Any:
        """A fresh executable, past JAX's compile cache."""
        return compiler.backend_compile_and_load(
            self.backend, self.module, self.devices, self.options, self.callbacks
        )

    def serialized(self, executable: Any) -> bytes:
        """The bytes of a fresh executable."""
        return bytes(self.backend.serialize_executable(executable))

    def load(self, payload: bytes) -> Any:
        """The executable in bytes that are trusted. Fails: jax.errors.JaxRuntimeError."""
        return self.backend.deserialize_executable(payload, self.devices, self.options)


Maker: TypeAlias = Callable[[Compile], Any]


@final
class _Makers(threading.local):
    current: Maker | None = None


_makers: Final = _Makers()


def _compile_or_ask(
    backend: Any,
    computation: Any,
    devices: Any,
    compile_options: Any,
    host_callbacks: Any,
    executable_devices: Any,
    *rest: Any,
    **more: Any,
) -> Any:
    maker = _makers.current
    if maker is None:
        return _original(
            backend, computation, devices, compile_options, host_callbacks, executable_devices, *rest, **more
        )
    return maker(Compile(backend, computation, compile_options, host_callbacks, executable_devices))


def _check() -> None:
    found = tuple(inspect.signature(_original).parameters)
    if found[: len(_ARGUMENTS)] != _ARGUMENTS or not hasattr(compiler, "backend_compile_and_load"):
        raise BundleError(
            f"jax {jax.__version__} compiles in a way that is not known here: {', '.join(found)}",
            hint="use jax 0.10 or 0.11, or call the jitted function without a bundle",
        )


@contextmanager
def _made_by(maker: Maker) -> Iterator[None]:
    _check()
    if compiler.compile_or_get_cached is not _compile_or_ask:
        setattr(compiler, "compile_or_get_cached", _compile_or_ask)  # noqa: B010 - as a name, not as its type
    _makers.current = maker
    try:
        yield
    finally:
        _makers.current = None


def compiled_by(lowered: jax.stages.Lowered, maker: Maker) -> jax.stages.Compiled:
    """What `lowered.compile()` gives, around an executable that `maker` makes."""
    # Copies: JAX keeps executables with the lowering and with the module, and would give one that it has.
    ours = copy.copy(lowered)
    lowering = copy.copy(cast(Any, lowered)._lowering)
    with lowering._hlo.context:
        lowering._hlo = ir.Module.parse(_bytecode(lowering._hlo.operation))
    lowering._executable = None
    cast(Any, ours)._lowering = lowering
    asked = []

    def make(task: Compile) -> Any:
        asked.append(task)
        return maker(task)

    with _made_by(make):
        found = ours.compile()
    if len(asked) != 1:
        raise BundleError(
            f"jax {jax.__version__} asked {len(asked)} times to compile one function",
            hint="call the jitted function without a bundle",
        )
    return found


def program_of(task: Compile) -> str:
    """A digest of what is to be compiled: the module without its source locations, and the options."""
    with task.module.context:
        module = task.module.operation.clone()
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
        found = hashlib.sha256(_bytecode(module.operation))
    options = copy.deepcopy(task.options)
    debug = options.executable_build_options.debug_options
    for field, nothing in _PASSING.items():
        if hasattr(debug, field):
            setattr(debug, field, nothing)
    found.update(options.SerializeAsString())
    return found.hexdigest()


def _bytecode(operation: Any) -> bytes:
    text = io.BytesIO()
    operation.write_bytecode(text)
    return text.getvalue()


def place_of(task: Compile) -> Place:
    """What it is to be compiled for."""
    devices = list(task.devices)
    platform = str(task.backend.platform)
    flags = os.environ.get("XLA_FLAGS", "").split()
    return Place(
        jax=jax.__version__,
        jaxlib=jaxlib.version.__version__,
        platform=f"{platform} {task.backend.platform_version}" if platform != "cpu" else platform,
        device_kind=devices[0].device_kind,
        host=cpu_features() if platform == "cpu" else "",
        num_devices=len(devices),
        num_processes=len({device.process_index for device in devices}),
        nproc=_num_threads() if platform == "cpu" else "",
        flags=tuple(sorted(flag for flag in flags if not flag.startswith("--xla_dump"))),
    )


def _num_threads() -> str:
    """The size of XLA's thread pool, as PJRT finds it (`DefaultThreadPoolSize` in xla/pjrt/utils.cc).

    A launch says it, a run of one seldom does: where it is the same, either takes what the other compiled.
    """
    given = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC")
    return given or str(len(os.sched_getaffinity(0)))


def leaves(lowered: jax.stages.Lowered) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...], tuple[int, ...]]:
    """What goes in, what comes out, and which of those that go in are donated; for people to read."""
    ins = jax.tree_util.tree_flatten_with_path(lowered.args_info)[0]
    outs = jax.tree_util.tree_flatten_with_path(lowered.out_info)[0]
    donated = tuple(number for number, (_, info) in enumerate(ins) if info.donated)
    return tuple(_leaf(*one) for one in ins), tuple(_leaf(*one) for one in outs), donated


def _leaf(path: Any, info: Any) -> Leaf:
    sharding = getattr(info, "sharding", None)
    spec = getattr(sharding, "spec", None)
    return Leaf(
        jax.tree_util.keystr(path), tuple(info.shape), str(info.dtype), "" if spec is None else str(spec)
    )
