"""Output of workers: a file for each, and the lines that people see.

A worker writes to its file itself, so nothing is lost with the agent. The agent follows the files of the
slots that are shown and puts a prefix before each line. A console that takes nothing holds nobody up: then
lines are left out.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final, final

_MAX_READ: Final = 1 << 18
_MAX_LINE: Final = 4000
_TAIL_BYTES: Final = 1 << 16


def opened(path: str) -> int:
    """The file at `path` for appending, made with its folder if need be. Fails: OSError."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def size_of(fd: int) -> int:
    """How much is in an open file: what other processes wrote there before, of earlier launches too."""
    return os.fstat(fd).st_size


def last_lines(path: str, count: int, *, since: int = 0) -> list[str]:
    """The last lines of a file from the byte `since` on, as far as it can be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(since, size_of(file.fileno()) - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return []
    return [line[:_MAX_LINE] for line in text.splitlines() if line.strip()][-count:]


def last_error(lines: list[str]) -> str:
    """The last of these lines that may say why a process ended; empty if none does.

    What follows `hint:` says what to do about an error, not what it is.
    """
    hints = [at for at, line in enumerate(lines) if line.startswith("hint:")]
    return "".join(lines[: hints[-1] if hints else None][-1:])


@final
class Tail:
    """Follows a file that another process appends to, from the byte `since` on."""

    def __init__(self, path: str, *, since: int = 0) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._at = since
        self._rest = b""

    def lines(self, *, all_: bool = False) -> list[str]:
        """The lines that are whole since the last call; with `all_` also one that has no end yet."""
        with contextlib.suppress(OSError):
            if data := os.pread(self._fd, _MAX_READ, self._at):
                self._at += len(data)
                self._rest += data
        *whole, self._rest = self._rest.split(b"\n")
        if self._rest and (all_ or len(self._rest) > _MAX_LINE):
            whole.append(self._rest)
            self._rest = b""
        # Progress bars overwrite their line: only what stands there in the end is shown.
        texts = [line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace") for line in whole]
        return [text[:_MAX_LINE] for text in texts]

    def close(self) -> None:
        os.close(self._fd)


@final
class Console:
    """Lines for people, on a descriptor that may be a pipe whose reader is slow or gone."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._dropped = 0
        self._cut = False
        with contextlib.suppress(OSError):
            # Only where nobody else shares the open file: a terminal belongs to the shell as well.
            if not os.isatty(fd):
                os.set_blocking(fd, False)

    def say(self, text: str) -> None:
        """Print a line. Never blocks and never fails; lines that find no room are counted instead."""
        if self._dropped:
            text = f"({self._dropped} lines are missing here)\n{text}"
        data = f"{text}\n".encode(errors="backslashreplace")
        try:
            # What found no room of the line before is lost; this one begins on a line of its own.
            data = b"\n" + data if self._cut else data
            self._cut = os.write(self._fd, data) < len(data)
            self._dropped = 0
        except OSError:
            self._dropped += 1


def shown(choice: str) -> frozenset[int] | None:
    """The slots that `--log-ranks` names: "0,3"; None for "all". Fails: ValueError."""
    if choice.strip() == "all":
        return None
    return frozenset(int(part) for part in choice.split(",") if part.strip())


def log_path(folder: str, name: str) -> str:
    """Where the output of a process of the run goes."""
    return str(Path(folder) / "logs" / f"{name}.log")
