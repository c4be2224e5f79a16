"""What several tests of arrays need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.arrays import copying


@pytest.fixture(params=[16, 32, 64])
def width(request: pytest.FixtureRequest) -> Iterator[int]:
    """Bytes of the registers that native code uses, as long as the test runs."""
    if copying.library is None:
        pytest.skip("built without native code")
    try:
        if (taken := copying.library.holdfast_width(request.param)) != request.param:
            pytest.skip(f"this processor has registers of {taken} bytes, not of {request.param}")
        yield request.param
    finally:
        copying.library.holdfast_width(0)
