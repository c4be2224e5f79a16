"""Serving a run's coordinator, and reaching one: addresses, tokens, sessions."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.coord import CoordClient
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.coord import Settings

_MAX_TOKEN = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a coordinator keeps its log, listens, and says so."""

    folder: Path
    bind: Sequence[str]
    token_file: Path | None
    discovery: Path
    journal: str | None = None


def placed(
    folder: str,
    *,
    bind: Sequence[str],
    discovery: str | None,
    token_file: str | None,
    no_token: bool,
    journal: str | None,
) -> Place:
    """The place with its defaults: an own token and a discovery file beside the log."""
    root = Path(folder).absolute()
    return Place(
        folder=root,
        bind=bind or ("tcp://127.0.0.1:0",),
        token_file=None if no_token else Path(token_file or root / "token"),
        discovery=Path(discovery or root / "address"),
        journal=journal,
    )


def run(
    place: Place, settings: Settings, *, make_token: bool, ready: Callable[[tuple[str, ...]], None]
) -> None:
    """Serve until SIGTERM or SIGINT. Fails: UsageError, LeaseError, CorruptError, StorageError."""
    from holdfast.coord import serve
    from holdfast.journal import Journal

    logging.basicConfig(format="holdfast coordinator: %(message)s", level=logging.WARNING)
    place.folder.mkdir(parents=True, exist_ok=True)
    if make_token and place.token_file is not None and not place.token_file.exists():
        _write_token(place.token_file)
    token = None if place.token_file is None else read_token(place.token_file)
    with ExitStack() as stack:
        journal = None
        if place.journal is not None:
            journal = Journal(place.journal, component="coordinator")
            stack.callback(journal.close)
        serve(
            settings,
            place.folder,
            bind=place.bind,
            token=token,
            discovery=place.discovery,
            journal=journal,
            ready=ready,
        )


def reached(addresses: Sequence[str], *, run: str, token_file: str | None, timeout_s: float) -> CoordClient:
    """A session with the coordinator. Fails: UsageError, UnreachableError, HandshakeError."""
    if not addresses:
        raise UsageError(
            "no coordinator was named",
            hint="give --coordinator tcp://HOST:PORT, unix:/path or file:/path, or set HOLDFAST_COORD",
        )
    token = None if token_file is None else read_token(Path(token_file))
    return CoordClient(addresses, run=run, token=token, name="holdfast coord", connect_timeout_s=timeout_s)


def read_token(path: Path) -> bytes:
    """The token in a file, without the newline that editors add. Fails: UsageError."""
    try:
        with path.open("rb") as file:
            token = file.read(_MAX_TOKEN + 1).rstrip(b"\r\n")
    except OSError as error:
        raise UsageError(
            f"cannot read the token in {path}: {error.strerror}",
            hint="give --token-file the token of the run that is meant, or set HOLDFAST_TOKEN_FILE",
        ) from error
    if not token or len(token) > _MAX_TOKEN:
        raise UsageError(
            f"{path} holds no token: {len(token):,} bytes", hint=f"a token has 16 to {_MAX_TOKEN:,} bytes"
        )
    return token


def _write_token(path: Path) -> None:
    """A new token that only this user can read; the first of several processes makes it."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(new, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(new)
