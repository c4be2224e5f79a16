"""`python -m holdfast.coord --folder F --bind tcp://127.0.0.1:0`: serve one run until SIGTERM.

Once clients can come, one line of JSON says where: {"ready": ["tcp://127.0.0.1:40123"], "pid": 4242}.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from dataclasses import fields
from pathlib import Path

from holdfast.coord.orphans import OrphanWatch
from holdfast.coord.server import serve
from holdfast.coord.settings import Settings
from holdfast.errors import HoldfastError, UsageError
from holdfast.journal import Journal

_MAX_TOKEN = 4096


def main() -> int:
    options = _parser().parse_args()
    logging.basicConfig(format="holdfast coordinator: %(message)s", level=options.log_level.upper())
    journal = Journal(options.journal, component="coordinator") if options.journal else None
    orphans = OrphanWatch(options.lease, options.orphan_s) if options.lease else None
    try:
        serve(
            _settings(options),
            options.folder,
            bind=options.bind or ["tcp://127.0.0.1:0"],
            token=_token(options),
            discovery=options.discovery,
            journal=journal,
            ready=lambda addresses: print(json.dumps({"ready": addresses, "pid": os.getpid()}), flush=True),
        )
    except HoldfastError as error:
        print(f"error: {error}", file=sys.stderr)
        return 78 if isinstance(error, UsageError) else 1
    finally:
        if orphans is not None:
            orphans.close()
        if journal is not None:
            journal.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="holdfast.coord", description=__doc__)
    parser.add_argument("--folder", required=True, help="where the coordinator keeps its log")
    parser.add_argument("--bind", action="append", help="tcp://HOST:PORT or unix:/path; may be given again")
    parser.add_argument("--discovery", help="a file that says where the coordinator is")
    parser.add_argument("--journal", help="the journal of the run")
    parser.add_argument("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--lease", help="a file that this coordinator's agent holds locked")
    parser.add_argument("--orphan-s", type=float, default=30.0, help="how long to stay without an agent")
    token = parser.add_mutually_exclusive_group()
    token.add_argument("--token-file", help="a file with the run's token")
    token.add_argument("--token-fd", type=int, help="an inherited descriptor to read the token from")
    for field in fields(Settings):
        name = f"--{field.name.replace('_', '-')}"
        if field.type == "bool":
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=None)
        else:
            kind = {"int": int, "float": float, "str": str}[str(field.type)]
            parser.add_argument(name, type=kind, default=None)
    return parser


def _settings(options: argparse.Namespace) -> Settings:
    given = {field.name: getattr(options, field.name) for field in fields(Settings)}
    return Settings(**{name: value for name, value in given.items() if value is not None})


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
