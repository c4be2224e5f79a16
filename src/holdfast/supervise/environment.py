"""What a worker's environment must say before a framework starts, for the same bits and for short waits.

XLA reads its flags once, when the first backend starts, and it sizes its thread pool then: by the time
`holdfast.join` runs it may be too late. So the agent sets these for every worker that it starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from holdfast.errors import UsageError

COLLECTIVE_TIMEOUT_S: Final = 60
"""How long a collective on CPUs waits for a peer; XLA's own default is half an hour. It only ends what nobody
else ends: a worker whose peer died is killed by its agent. Much shorter, and a peer that still compiles would
be an error."""

_TIMEOUT_FLAG: Final = "--xla_cpu_collective_timeout_seconds"


def world_environment(
    workers: int,
    *,
    nproc: int | None = None,
    cache: Path | None = None,
    given: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The variables to add to a worker's environment, for replicas of `workers` workers. Pure but for the
    number of cores, and `os.environ` where nothing is `given`.

    What the user has set stands: a flag or variable found in `given` is not changed.

        NPROC                      the size of XLA's thread pool. Bits depend on it, and a machine with
                                   another number of cores would give others. Default: the cores that
                                   this process may use; set it where machines differ.
        JAX_COMPILATION_CACHE_DIR  `cache`, with every compile kept, however short
        XLA_FLAGS                  for several workers: collectives give up after COLLECTIVE_TIMEOUT_S

    Fails: UsageError for a count below 1.
    """
    given = os.environ if given is None else given
    nproc = len(os.sched_getaffinity(0)) if nproc is None else nproc
    if workers < 1 or nproc < 1:
        raise UsageError(
            f"workers={workers} and nproc={nproc} must be at least 1",
            hint="--workers-per-replica and --nproc count from 1",
        )
    wanted = {"NPROC": str(nproc)}
    if cache is not None:
        wanted["JAX_COMPILATION_CACHE_DIR"] = str(cache)
        wanted["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    found = {name: value for name, value in wanted.items() if name not in given}
    flags = given.get("XLA_FLAGS", "")
    if workers > 1 and _TIMEOUT_FLAG not in flags:
        found["XLA_FLAGS"] = f"{flags} {_TIMEOUT_FLAG}={COLLECTIVE_TIMEOUT_S}".strip()
    return found
