"""Which software wrote a checkpoint; for people, never for decisions."""

from __future__ import annotations

import platform
from functools import lru_cache
from importlib import metadata


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """The versions recorded in a manifest."""
    found = {"python": platform.python_version()}
    for package in ("holdfast", "numpy", "jax"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
