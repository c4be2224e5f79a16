"""The secret of a run: one file, however the run is started."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Final

from holdfast.errors import StorageError

_BYTES: Final = 32


def run_token(folder: Path) -> str:
    """The run's token, made at its first start, whole or not at all. Only this user can read the file.

    Alone and launched it is the same: what the one has sealed, the other opens. Fails: StorageError.
    """
    path = folder / "coord" / "token"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _read(path) or _made(path)
    except OSError as error:
        # Without its chain: what Python tried on the way to it says nothing more.
        raise StorageError.from_os(error, doing="keep a run in", path=str(folder)) from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return ""


def _made(path: Path) -> str:
    new = path.with_name(f"token.{os.getpid()}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    token = secrets.token_hex(_BYTES)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(f"{token}\n")
            file.flush()
            os.fsync(file.fileno())
        # Of two that start at once, one makes it: a link replaces nothing.
        with suppress(FileExistsError):
            os.link(new, path)
            return token
        if found := _read(path):
            return found
        os.replace(new, path)  # a power failure left it empty
        return token
    finally:
        new.unlink(missing_ok=True)
