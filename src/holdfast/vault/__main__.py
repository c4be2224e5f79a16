"""`python -m holdfast.vault --fd N` (spawned by a checkpointer) or `--listen PATH` (standing).

A standing vault that offers its states says where in the file PATH.address.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from holdfast.errors import HoldfastError, UsageError
from holdfast.vault.messages import ServeAt
from holdfast.vault.server import Standing, serve_inherited, serve_listening

_MAX_TOKEN = 4096


def main() -> int:
    options = _parser().parse_args()
    logging.basicConfig(format="holdfast vault: %(message)s", level=logging.WARNING)
    if options.fd is not None:
        serve_inherited(options.fd)
        return 0
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        serve_listening(options.listen, _settings(options), stop=stop)
    except HoldfastError as error:
        print(f"error: {error}", file=sys.stderr)
        return 78 if isinstance(error, UsageError) else 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="holdfast.vault", description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--fd", type=int, help="serve the trainer at this inherited socket")
    where.add_argument("--listen", metavar="PATH", help="serve everyone at this Unix socket")
    parser.add_argument(
        "--keep-staged", type=int, default=1, metavar="K", help="states of each rank that outlive its trainer"
    )
    parser.add_argument("--memory-limit", type=int, metavar="BYTES", help="host memory never exceeded")
    parser.add_argument("--lease", metavar="PATH", help="a file that the node's agent holds a lock on")
    parser.add_argument(
        "--orphan-s", type=float, default=30.0, help="end when nobody held the lease for so long"
    )
    parser.add_argument("--serve", metavar="HOST:PORT", help="offer states from the start, at this address")
    parser.add_argument("--run", default="run", help="the run whose states are offered")
    parser.add_argument(
        "--neighbour",
        action="append",
        default=[],
        metavar="NODE=ADDRESS",
        help="keep copies of that node's states; file:PATH for the file that says the address",
    )
    parser.add_argument(
        "--neighbourhood", metavar="PATH", help="a file of such lines, which may change at any time"
    )
    token = parser.add_mutually_exclusive_group()
    token.add_argument("--token-file", help="a file with the run's token")
    token.add_argument("--token-fd", type=int, help="an inherited descriptor to read the token from")
    return parser


def _settings(options: argparse.Namespace) -> Standing:
    if options.keep_staged < 0 or options.orphan_s < 0:
        raise UsageError("--keep-staged and --orphan-s are not negative")
    if options.neighbour and options.neighbourhood is not None:
        raise UsageError("--neighbour and --neighbourhood: one of them", hint="write it into the file")
    token = _token(options)
    neighbours = []
    for text in options.neighbour:
        node, _, address = text.partition("=")
        if not node or not address:
            raise UsageError(f"--neighbour {text}: a node and its vault's address", hint="NODE=ADDRESS")
        neighbours.append((node, address))
    return Standing(
        keep=options.keep_staged,
        memory_limit=options.memory_limit,
        lease=options.lease,
        orphan_s=options.orphan_s,
        serve=None if options.serve is None else ServeAt(options.serve, options.run, token),
        neighbours=tuple(neighbours),
        neighbourhood=options.neighbourhood,
    )


def _token(options: argparse.Namespace) -> bytes | None:
    """The token, without the newline at the end that editors add."""
    try:
        if options.token_file is not None:
            data = Path(options.token_file).read_bytes()[:_MAX_TOKEN]
        elif options.token_fd is not None:
            with os.fdopen(options.token_fd, "rb") as file:
                data = file.read(_MAX_TOKEN)
        else:
            return None
    except OSError as error:
        raise UsageError(f"cannot read the token: {error.strerror}") from error
    return data.rstrip(b"\r\n")


if __name__ == "__main__":
    sys.exit(main())
