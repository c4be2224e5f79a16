"""The few calls of the CUDA driver that staging needs, behind a small protocol.

JAX has no way to copy a device's memory into host memory that somebody else owns. The driver has, and it is
in every process that uses an NVIDIA GPU: `libcuda.so.1`, called by ctypes, so that nothing is built and no
package is added. Streams and events of our own live in the primary context, which XLA uses as well.

Most tests run on machines without a GPU, with the stand-in of `holdfast.testing.cuda`, which keeps to the
same protocol and checks the rules written down here; those of tests/gpu run the real driver.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol, final

from holdfast.errors import StagingError

_SUCCESS: Final = 0
_NOT_READY: Final = 600
_REGISTER_PORTABLE: Final = 0x01
"""Pinned for every context of the process: one arena serves all devices."""
_STREAM_NON_BLOCKING: Final = 0x01
"""No implicit order with the legacy default stream, on which a library may wait for everything."""
_EVENT_DISABLE_TIMING: Final = 0x02

_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (ctypes.c_void_p, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.c_void_p, ctypes.c_int),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (ctypes.c_void_p,),
    "cuMemHostRegister_v2": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint),
    "cuMemHostUnregister": (ctypes.c_void_p,),
    "cuStreamCreate": (ctypes.c_void_p, ctypes.c_uint),
    "cuStreamDestroy_v2": (ctypes.c_void_p,),
    "cuEventCreate": (ctypes.c_void_p, ctypes.c_uint),
    "cuEventDestroy_v2": (ctypes.c_void_p,),
    "cuEventRecord": (ctypes.c_void_p, ctypes.c_void_p),
    "cuEventQuery": (ctypes.c_void_p,),
    "cuMemcpyDtoHAsync_v2": (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p),
    "cuGetErrorName": (ctypes.c_int, ctypes.c_void_p),
}


class Driver(Protocol):
    """What copies from devices. Every call fails with StagingError and names what the driver said.

    All of them but `bind` are made within it. A range stays registered, and a stream or event alive, until
    every copy that was given to it is known to be done.
    """

    def bind(self, device: int) -> AbstractContextManager[None]:
        """Have the calling thread work on a device, by its number in this process, and then as before."""
        ...

    def register(self, address: int, nbytes: int) -> None:
        """Pin host memory, so that devices copy into it directly."""
        ...

    def unregister(self, address: int) -> None: ...

    def make_stream(self) -> int: ...

    def destroy_stream(self, stream: int) -> None: ...

    def make_event(self) -> int: ...

    def destroy_event(self, event: int) -> None: ...

    def copy_out(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy from device memory at `source` to registered host memory at `target`."""
        ...

    def record(self, event: int, stream: int) -> None:
        """Have `event` happen once all that is in the stream now is done."""
        ...

    def happened(self, event: int) -> bool:
        """Whether an event that was recorded has happened. Does not wait."""
        ...


@final
class CudaDriver:
    """The driver of NVIDIA GPUs. Fails: StagingError where there is none."""

    def __init__(self) -> None:
        try:
            # Calls release the interpreter's lock, as they must: registering takes tenths of a second.
            self._library = ctypes.CDLL("libcuda.so.1")
            for name, arguments in _SIGNATURES.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = list(arguments), ctypes.c_int
        except (OSError, AttributeError) as error:
            raise StagingError(f"the CUDA driver cannot be used: {error}") from error
        self._contexts: dict[int, int] = {}
        self._lock = threading.Lock()
        self._call("cuInit", 0)

    @contextmanager
    def bind(self, device: int) -> Iterator[None]:
        # The thread may be the program's, whose other libraries have a device of their own current on it.
        self._call("cuCtxPushCurrent_v2", self._context(device))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _context(self, device: int) -> int:
        with self._lock:
            context = self._contexts.get(device)
            if context is None:
                handle, found = ctypes.c_int(), ctypes.c_void_p()
                self._call("cuDeviceGet", ctypes.byref(handle), device)
                # Never released: it is the context that XLA lives in, until the process ends.
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(found), handle)
                context = self._contexts[device] = found.value or 0
            return context

    def register(self, address: int, nbytes: int) -> None:
        self._call("cuMemHostRegister_v2", address, nbytes, _REGISTER_PORTABLE)

    def unregister(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def make_stream(self) -> int:
        return self._made("cuStreamCreate", _STREAM_NON_BLOCKING)

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def make_event(self) -> int:
        return self._made("cuEventCreate", _EVENT_DISABLE_TIMING)

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy_v2", event)

    def copy_out(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyDtoHAsync_v2", target, source, nbytes, stream)

    def record(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def happened(self, event: int) -> bool:
        result = int(self._library.cuEventQuery(event))
        if result == _NOT_READY:
            return False
        self._check("cuEventQuery", result)
        return True

    def _made(self, function: str, flags: int) -> int:
        found = ctypes.c_void_p()
        self._call(function, ctypes.byref(found), flags)
        return found.value or 0

    def _call(self, function: str, *arguments: Any) -> None:
        self._check(function, int(getattr(self._library, function)(*arguments)))

    def _check(self, function: str, result: int) -> None:
        if result != _SUCCESS:
            raise StagingError(f"{function} failed: {self._name(result)}")

    def _name(self, result: int) -> str:
        found = ctypes.c_char_p()
        named = self._library.cuGetErrorName(result, ctypes.byref(found)) == _SUCCESS
        return f"{found.value.decode()} ({result})" if named and found.value else f"error {result}"
