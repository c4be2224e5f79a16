"""A control group of the test's own, with little memory, below the one it runs in; and a launch inside it.

python -m tests.recovery.memory_group [options of holdfast launch]      the group is that of RECOVERY_GROUP
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

ENV: Final = "RECOVERY_GROUP"
PROGRAM: Final = ("-m", "tests.recovery.memory_group", "launch")
_ROOT: Final = Path("/sys/fs/cgroup")
_LIMITS: Final = ("memory.max", "memory.limit_in_bytes")
_EMPTY_S: Final = 20.0


@contextmanager
def memory_group(limit: int) -> Iterator[Path | None]:
    """The folder of a new group that may use `limit` bytes; None where no group can be made."""
    made = _made(limit)
    try:
        yield made
    finally:
        if made is not None:
            _remove(made)


def _made(limit: int) -> Path | None:
    for parent in _own_groups():
        group = parent / f"holdfast-test-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            for name in _LIMITS:
                with suppress(OSError):
                    if (group / name).exists():
                        (group / name).write_text(str(limit))
                        return group
            group.rmdir()
    return None


def _own_groups() -> Iterator[Path]:
    """Where this process is: of the second version, and of the memory controller of the first."""
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, place = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield _ROOT / "memory" / place.lstrip("/")
        elif not controllers:
            yield _ROOT / place.lstrip("/")


def _remove(group: Path) -> None:
    """Its processes may need a moment to be gone."""
    ends = time.monotonic() + _EMPTY_S
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.05)


def main() -> None:
    (Path(os.environ[ENV]) / "cgroup.procs").write_text(str(os.getpid()))
    from holdfast.cli import main as holdfast

    holdfast()


if __name__ == "__main__":
    main()
