"""`python -m holdfast.vault --fd N` (spawned by a checkpointer) or `--listen PATH` (standing)."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from types import FrameType

from holdfast.vault.server import serve_inherited, serve_listening


def main() -> int:
    parser = argparse.ArgumentParser(prog="holdfast.vault", description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--fd", type=int, help="serve the trainer at this inherited socket")
    where.add_argument("--listen", metavar="PATH", help="serve everyone at this Unix socket")
    options = parser.parse_args()
    logging.basicConfig(format="holdfast vault: %(message)s", level=logging.WARNING)
    if options.fd is not None:
        serve_inherited(options.fd)
        return 0
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    serve_listening(options.listen, stop=stop)
    return 0


if __name__ == "__main__":
    sys.exit(main())
