"""What devices can do: memory, peak rate by number format, bandwidth; and what is known of unknown ones.

Rates are of dense matrix products with accumulation in float32, from the makers' data sheets; sparse figures,
which are twice as high, are no help to training. `float32` is without the shortened formats (TF32).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, final

_G: Final = 10**9
_T: Final = 1e12
_NO_RATES: Final[Mapping[str, float]] = MappingProxyType({})


@final
@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device. A figure of 0 is not known."""

    name: str
    memory: int = 0
    """Bytes in all; programs get a little less."""
    rates: Mapping[str, float] = field(default_factory=lambda: _NO_RATES)
    """Operations in a second, by dtype."""
    bandwidth: float = 0.0
    """Bytes in a second between the device and its own memory."""
    platform: str = "gpu"
    """What JAX calls the kind: cpu, gpu, tpu."""
    known: bool = True
    """Whether it is in the table; otherwise these figures are what the runtime says."""

    def peak(self, dtype: str) -> float:
        """Operations in a second with operands of `dtype`; 0 if not known."""
        return self.rates.get(dtype, 0.0)


def _device(
    name: str,
    gigabytes: int,
    bandwidth: float,
    half: float,
    single: float,
    eight: float = 0.0,
    *,
    bf16: bool = True,
    platform: str = "gpu",
) -> Device:
    rates = {"float16": half * _T, "float32": single * _T}
    if bf16:
        rates["bfloat16"] = half * _T
    if eight:
        rates["float8"] = eight * _T
    return Device(name, gigabytes * _G, MappingProxyType(rates), bandwidth * 1e9, platform)


# Pattern of the kind that JAX reports, in the order of trial; GB, GB/s, then TFLOP/s of 16, 32 and 8 bits.
# Whole words alone: an RTX A1000 is no A100, and the laptop kind of an RTX 4090 is another chip.
TABLE: Final[tuple[tuple[str, Device], ...]] = (
    (r"\bGB200\b", _device("GB200", 186, 8000, 2500, 80, 5000)),
    (r"\bB200\b", _device("B200", 180, 8000, 2250, 75, 4500)),
    (r"\bGH200\b.*\b144GB?\b", _device("GH200 144GB", 144, 4900, 989.5, 67, 1979)),
    (r"\bGH200\b", _device("GH200", 96, 4000, 989.5, 67, 1979)),
    (r"\bH200 NVL\b", _device("H200 NVL", 141, 4800, 835.5, 60, 1671)),
    (r"\bH200\b", _device("H200", 141, 4800, 989.5, 67, 1979)),
    (r"\bH100 NVL\b", _device("H100 NVL", 94, 3900, 835.5, 60, 1671)),
    (r"\bH100 PCIe\b", _device("H100 PCIe", 80, 2000, 756.5, 51, 1513)),
    (r"\bH100\b", _device("H100", 80, 3350, 989.5, 67, 1979)),
    (r"\bA100\b.*\b40GB\b", _device("A100 40GB", 40, 1555, 312, 19.5)),
    (r"\bA100\b", _device("A100 80GB", 80, 2039, 312, 19.5)),
    (r"\bA10\b", _device("A10", 24, 600, 125, 31.2)),
    (r"\bL40S\b", _device("L40S", 48, 864, 362, 91.6, 733)),
    (r"\bL4\b", _device("L4", 24, 300, 121, 30.3, 242)),
    (r"\bV100S\b", _device("V100S", 32, 1134, 130, 16.4, bf16=False)),
    (r"\bV100\b.*\b16GB\b", _device("V100 16GB", 16, 900, 125, 15.7, bf16=False)),
    (r"\bV100\b", _device("V100", 32, 900, 125, 15.7, bf16=False)),
    (r"\bRTX 4090\b(?! (D|Laptop)\b)", _device("RTX 4090", 24, 1008, 165.2, 82.6, 330.3)),
    (r"\bRTX 3090\b(?! Ti\b)", _device("RTX 3090", 24, 936, 71, 35.6)),
    (r"\bMI300X\b", _device("MI300X", 192, 5300, 1307.4, 163.4, 2614.9)),
    (r"\bTPU v6( lite|e)\b", _device("TPU v6e", 32, 1640, 918, 459, platform="tpu")),
    (r"\bTPU v5( lite|e)\b", _device("TPU v5e", 16, 819, 197, 98, platform="tpu")),
    (r"\bTPU v5p?\b", _device("TPU v5p", 95, 2765, 459, 229, platform="tpu")),
    (r"\bTPU v4\b(?! lite\b)", _device("TPU v4", 32, 1228, 275, 137, platform="tpu")),
)


def lookup(kind: str) -> Device | None:
    """The device that JAX's `device_kind`, or a short name as `h200`, stands for. None: not in the table."""
    for pattern, device in TABLE:
        if re.search(pattern, kind, re.IGNORECASE):
            return device
    return None


def here(device: Any = None) -> Device:
    """The device that JAX would compute on, or `device`; starts JAX's backend.

    One that is not in the table is described by what the runtime says: its memory, and no peak rate, so that
    a share of the peak (MFU) is not shown rather than shown wrong.
    """
    import jax

    found = device if device is not None else jax.local_devices()[0]
    known = lookup(found.device_kind)
    if known is not None:
        return known
    return Device(found.device_kind, memory=_reported_memory(found), platform=found.platform, known=False)


def known_names() -> tuple[str, ...]:
    """The names in the table."""
    return tuple(device.name for _, device in TABLE)


def _reported_memory(device: Any) -> int:
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        stats = device.memory_stats() or {}
    except Exception:  # what a runtime raises that has no such figure is its own business
        return 0
    return int(stats.get("bytes_limit", 0))
