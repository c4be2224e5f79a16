"""The CUDA driver's calls by ctypes, against a library of the same functions that does nothing."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from holdfast.clock import Deadline
from holdfast.errors import StagingError
from holdfast.jax import cuda
from holdfast.jax.cuda import CudaDriver
from holdfast.jax.engine import Copy, CopyEngine
from holdfast.jax.pins import PinBudget

FAR = 0x7F12_3456_7000  # beyond 32 bits: what a wrong argument type would cut
NAME = ctypes.create_string_buffer(b"CUDA_ERROR_INVALID_VALUE")


class Library:
    """Functions with the C calling convention that write down what they are given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.results: dict[str, int] = {}
        self.contexts: list[int] = []
        """Those that are current on the one thread there is."""
        self._kept = []
        for name, arguments in cuda._SIGNATURES.items():
            function = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(self._taking(name))
            self._kept.append(function)
            setattr(self, name, function)

    def _taking(self, name: str) -> Callable[..., int]:
        def take(*given: Any) -> int:
            self.calls.append((name, given))
            if name == "cuCtxPushCurrent_v2" and name not in self.results:
                self.contexts.append(given[0])
            if name == "cuCtxPopCurrent_v2":
                ctypes.c_void_p.from_address(given[0]).value = self.contexts.pop()
            if name in ("cuStreamCreate", "cuEventCreate", "cuDevicePrimaryCtxRetain"):
                ctypes.c_void_p.from_address(given[0]).value = FAR + len(name)
            if name == "cuDeviceGet":
                ctypes.c_int.from_address(given[0]).value = 10 + given[1]
            if name == "cuGetErrorName":
                ctypes.c_void_p.from_address(given[1]).value = ctypes.addressof(NAME)
            return self.results.get(name, 0)

        return take

    def said(self, name: str) -> list[tuple[Any, ...]]:
        return [given for called, given in self.calls if called == name]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: found if name == "libcuda.so.1" else pytest.fail(name))
    return found


def test_every_call_hands_its_arguments_over_whole(library: Library) -> None:
    driver = CudaDriver()
    assert library.said("cuInit") == [(0,)]
    context = FAR + len("cuDevicePrimaryCtxRetain")
    for _ in range(2):
        with driver.bind(1):
            assert library.contexts == [context]
        assert library.contexts == []
    assert len(library.said("cuDevicePrimaryCtxRetain")) == 1, "the context is retained once"
    assert library.said("cuDevicePrimaryCtxRetain")[0][1] == 11
    driver.register(FAR, 1 << 33)
    assert library.said("cuMemHostRegister_v2") == [(FAR, 1 << 33, 1)]
    stream, event = driver.make_stream(), driver.make_event()
    assert (stream, event) == (FAR + len("cuStreamCreate"), FAR + len("cuEventCreate"))
    assert library.said("cuStreamCreate")[0][1] == 1, "not blocking"
    driver.copy_out(FAR + 1, (1 << 47) + 3, (1 << 32) + 5, stream)
    assert library.said("cuMemcpyDtoHAsync_v2") == [(FAR + 1, (1 << 47) + 3, (1 << 32) + 5, stream)]
    driver.record(event, stream)
    assert library.said("cuEventRecord") == [(event, stream)]
    assert driver.happened(event)
    library.results["cuEventQuery"] = 600
    assert not driver.happened(event)
    driver.destroy_event(event)
    driver.destroy_stream(stream)
    driver.unregister(FAR)
    assert library.said("cuMemHostUnregister") == [(FAR,)]


def test_what_the_driver_refuses_has_its_name(library: Library) -> None:
    driver = CudaDriver()
    library.results["cuMemHostRegister_v2"] = 1
    with pytest.raises(StagingError, match=r"cuMemHostRegister_v2 failed: CUDA_ERROR_INVALID_VALUE \(1\)"):
        driver.register(FAR, 4096)
    library.results |= {"cuEventQuery": 700, "cuGetErrorName": 1}
    with pytest.raises(StagingError, match="cuEventQuery failed: error 700"):
        driver.happened(FAR)


def test_a_machine_without_a_driver_says_so(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    library.results["cuInit"] = 100
    with pytest.raises(StagingError, match="cuInit failed"):
        CudaDriver()
    del library.cuEventQuery  # type: ignore[attr-defined]
    with pytest.raises(StagingError, match="cannot be used"):
        CudaDriver()

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(StagingError, match=r"libcuda\.so\.1"):
        CudaDriver()


@pytest.mark.parametrize("failing", ["", "cuCtxPushCurrent_v2", "cuMemcpyDtoHAsync_v2", "cuEventQuery"])
def test_the_device_of_the_calling_thread_is_as_before(library: Library, failing: str) -> None:
    """It may be the program's own, with another library at work on another device."""
    engine = CopyEngine(CudaDriver(), PinBudget(), drain_s=0.01)
    library.contexts.append(FAR)
    assert engine.register(4096, 4096, 0)
    assert library.contexts == [FAR]
    library.results |= {failing: 1} if failing else {}
    with pytest.raises(StagingError) if failing else nullcontext():
        engine.run(
            [Copy(0, 1, 4096, 8)], filled=lambda _done: None, stop=threading.Event(), deadline=Deadline(5.0)
        )
    assert library.contexts == [FAR]
    library.results.clear()
    engine.unregister(4096, 0)
    engine.close()
    assert library.contexts == [FAR]
    assert len(library.said("cuCtxPushCurrent_v2")) > 2
