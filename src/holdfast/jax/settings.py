"""What the environment says about copies between devices and host memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from holdfast.errors import UsageError

_SETTINGS: Final = {"auto": 0, "pinned_host": 1, "pageable": 2, "off": 3}


def setting(environment: Mapping[str, str]) -> int:
    """The first route that HOLDFAST_STAGING allows, as a number; one beyond the last for none."""
    chosen = environment.get("HOLDFAST_STAGING", "auto")
    if chosen not in _SETTINGS:
        raise UsageError(
            f"HOLDFAST_STAGING={chosen!r} is unknown", hint=f"one of {', '.join(_SETTINGS)}; auto if not set"
        )
    return _SETTINGS[chosen]


def pin_limit(environment: Mapping[str, str]) -> int:
    """The bytes of host memory that may be pinned at once: HOLDFAST_PIN_LIMIT, or half of what there is."""
    given = environment.get("HOLDFAST_PIN_LIMIT")
    if given is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    if not given.isdigit():
        raise UsageError(f"HOLDFAST_PIN_LIMIT={given!r} is no number of bytes")
    return int(given)
