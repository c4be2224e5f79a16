"""Fresh memory: as long as asked, zeroed, and begun where huge pages begin."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import numpy as np
import pytest

from holdfast.arrays.copying import address_of
from holdfast.arrays.pages import HUGE, region


@pytest.mark.parametrize("nbytes", [1, 4096, HUGE - 1, HUGE, HUGE + 1, 4 * HUGE + 8192, 7 * HUGE - 3])
def test_a_region_is_as_long_as_asked_and_can_be_written_whole(nbytes: int) -> None:
    one, other = region(nbytes), region(nbytes)
    assert one.size == nbytes
    assert not one.any()
    one[:] = 255
    assert not other.any()
    assert nbytes < HUGE or address_of(one) % HUGE == 0


def test_no_bytes_have_memory_too() -> None:
    assert region(0)[:0].size == 0


def _mapped() -> int:
    found = re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def test_memory_goes_with_the_last_view() -> None:
    before = _mapped()
    kept = region(64 * HUGE)[HUGE : 2 * HUGE]
    kept[:] = 7
    assert _mapped() >= before + 64 * HUGE
    assert np.all(kept == 7)
    del kept
    gc.collect()
    assert _mapped() < before + 32 * HUGE
