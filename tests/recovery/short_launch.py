"""`holdfast launch` with short deadlines in every phase: the command line has no options for those.

python -m tests.recovery.short_launch --run R --folder F [...] SCRIPT [ARGS]
"""

from __future__ import annotations

import argparse
import sys

from holdfast.launch import Launch, LaunchSettings
from holdfast.supervise.watch import Deadlines

PHASE_S = 4.0
PHASES = ("init", "compile", "restore", "save", "shutdown")
# To import numpy on a machine that has other things to do.
IMPORT_S = 12.0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True)
    parser.add_argument("--folder", required=True)
    for name in ("--replicas", "--workers-per-replica", "--nodes"):
        parser.add_argument(name, type=int, default=1)
    parser.add_argument("--parked", type=int, default=0)
    parser.add_argument("script", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    launch = Launch(
        LaunchSettings(
            script=tuple(options.script),
            run=options.run,
            folder=options.folder,
            replicas=options.replicas,
            workers_per_replica=options.workers_per_replica,
            nodes=options.nodes,
            parked=options.parked,
            deadlines=Deadlines(
                phases={**dict.fromkeys(PHASES, PHASE_S), "start": IMPORT_S, "import": IMPORT_S},
                step_s=2.0,
                first_step_s=PHASE_S,
            ),
            grace_s=20.0,
            flush_s=20.0,
        ),
        say=lambda line: print(line, flush=True),
    )
    with launch.signals():
        return launch.run()


if __name__ == "__main__":
    sys.exit(main())
