"""The native code with a copy that goes wrong once: what it compares and hashes must be what is there."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
from pathlib import Path

from hatch_build import SOURCES
from holdfast.arrays import copying

ROOT = Path(__file__).parents[2]
_COPIED = "COPIED(line)=({ extern void faulty_copied(char *); faulty_copied((char *)(line)); })"
_FAULTY = """
long faulty_at = -1;  /* which of the copies goes wrong; none if it is negative */
long faulty_made = 0;
void faulty_copied(char *to)
{
    if (__sync_fetch_and_add(&faulty_made, 1) == faulty_at)
        *to ^= 1;
}
"""


class FaultyLibrary:
    """The library, in which copy number `at` of those between arrays goes wrong by a bit."""

    def __init__(self, folder: Path) -> None:
        (folder / "faulty.c").write_text(_FAULTY)
        compiler = [*shlex.split(os.environ.get("CC", "cc")), "-O2", "-fPIC"]
        made = []
        for source in SOURCES:
            made.append(str(folder / f"{source.stem}.o"))
            _run([*compiler, f"-D{_COPIED}", "-c", str(ROOT / source), "-o", made[-1]])
        path = folder / "_faulty.so"
        _run([*compiler, "-shared", str(folder / "faulty.c"), *made, "-o", str(path)])
        found = copying.load(path)
        assert found is not None
        self.library = found
        self._at = ctypes.c_long.in_dll(found, "faulty_at")
        self._made = ctypes.c_long.in_dll(found, "faulty_made")

    def fail_at(self, at: int) -> None:
        """Let the copy of that number, counted from here on, go wrong; none if it is negative."""
        self._made.value, self._at.value = 0, at

    @property
    def made(self) -> int:
        """How many copies were made since."""
        return self._made.value


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
