"""Ranges of the files of a checkpoint, read without mapping them: a file that is cut short is an error."""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from typing import Any, Final, final

from holdfast.arrays.text import show
from holdfast.errors import FormatError, MissingPathError, StorageError

_HELD_OPEN: Final = 64


@final
class Files:
    """The files of a checkpoint; a few are held open at a time, since ten thousand writers left as many."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._sizes: dict[str, int] = {}
        self._open: OrderedDict[str, int] = OrderedDict()

    def path(self, name: str) -> str:
        """The path of a file of the checkpoint. Fails: FormatError for a name that leads out of it."""
        if not name or os.path.isabs(name) or ".." in name.split("/") or "\0" in name:
            raise FormatError(f"{self._root}: its metadata names the file {show(name)}, which lies elsewhere")
        return os.path.join(self._root, name)

    def window(self, name: str, begin: int, length: int) -> Window:
        """A range of a file. Fails: MissingPathError, FormatError if the file is shorter."""
        path = self.path(name)
        if name not in self._sizes:
            self._sizes[name] = os.fstat(self._fd(name)).st_size
        if begin < 0 or length < 0 or begin + length > self._sizes[name]:
            raise FormatError(
                f"{path} has {self._sizes[name]:,} bytes, but its metadata says that a record ends at "
                f"{begin + length:,}",
                hint="the file is truncated or from another save; copy the checkpoint again",
            )
        return Window(self, name, begin, length)

    def read_at(self, name: str, into: memoryview, offset: int) -> None:
        """Fill `into` from `offset` of a file. Fails: StorageError, FormatError where the file ends."""
        done, fd = 0, self._fd(name)
        while done < len(into):
            try:
                got = os.preadv(fd, [into[done:]], offset + done)
            except OSError as error:
                raise StorageError.from_os(error, doing="read", path=self.path(name)) from error
            if not got:
                raise FormatError(
                    f"{self.path(name)}: ends at byte {offset + done:,}", hint="the file was truncated"
                )
            done += got

    def _fd(self, name: str) -> int:
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        path = self.path(name)
        while len(self._open) >= _HELD_OPEN:
            os.close(self._open.popitem(last=False)[1])
        try:
            self._open[name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise MissingPathError(
                f"{path} is missing, but the checkpoint's metadata names it",
                path=path,
                hint="the checkpoint was not copied completely, or a writer failed; take another step",
            ) from None
        except OSError as error:
            raise StorageError.from_os(error, doing="open", path=path) from error
        return self._open[name]

    def close(self) -> None:
        """Close all of them."""
        while self._open:
            os.close(self._open.popitem()[1])


@final
class Window(io.RawIOBase):
    """A range of a file as a file of its own."""

    def __init__(self, files: Files, name: str, begin: int, length: int) -> None:
        self._files = files
        self._name = name
        self._begin = begin
        self.path = files.path(name)
        self.length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise OSError("a seek to before the beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        left = max(0, min(len(view), self.length - self._at))
        self.read_at(view[:left], self._at)
        self._at += left
        return left

    def read_at(self, into: memoryview, offset: int) -> None:
        """Fill `into` from `offset`. Fails: StorageError, FormatError where the file is shorter."""
        if offset < 0 or offset + len(into) > self.length:
            raise FormatError(f"{self.path}: a record ends beyond its own range")
        self._files.read_at(self._name, into, self._begin + offset)
