"""Builds what is written in C, where there is a compiler; without it much is slower, and nothing is wrong."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("src/holdfast/arrays")
SOURCES = tuple(
    FOLDER / name for name in ("registers.c", "streaming.c", "hashing.c", "scattering.c", "passing.c")
)
LIBRARY = FOLDER / "_native.so"
TIMEOUT_S = 120


class NativeCode(BuildHookInterface[Any]):
    """A wheel with the library has a platform, one without it has none."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; what fails is said and leaves a package that does without."""
        root = Path(self.root)
        if (why := built([root / source for source in SOURCES], root / LIBRARY)) is not None:
            self.app.display_warning(f"built without native code, so copies and loads are slower: {why}")
            return
        build_data["artifacts"].append(str(LIBRARY))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def built(sources: Sequence[Path], library: Path) -> str | None:
    """Why `library` could not be made from `sources`; None if it was. Nothing old is left in its place."""
    library.unlink(missing_ok=True)
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return f"it is written for Linux on x86_64, and this is {platform.system()} on {platform.machine()}"
    made = library.with_name(f"{library.name}.{os.getpid()}")
    compiler = shlex.split(os.environ.get("CC", "cc"))
    try:
        done = subprocess.run(
            [*compiler, "-O3", "-fPIC", "-shared", "-o", str(made), *map(str, sources)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
        if done.returncode != 0:
            return f"{compiler[0]} said: {done.stderr.strip()[-400:] or done.returncode}"
        os.replace(made, library)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no C compiler could be run: {error}"
    finally:
        made.unlink(missing_ok=True)
    return None
