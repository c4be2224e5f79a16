"""What a checkpoint needs of the place it lies in, whatever that is.

A store holds small whole files and large part files under names given component by component. Three
promises carry everything above it: `create` takes a name at most once, however many try; `replace` shows
readers the old bytes or the new ones; a part is seen whole or not at all once its writer's `sync` returned
and something refers to it. What is under way belongs to a live holder (`hold`), and ends with it.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self, final

import msgspec

from holdfast.errors import HoldfastError, MissingPathError, StorageError, UsageError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How to reach an object store; a folder on a file system needs none of it.

    What is not given here comes from the environment, under the names that obstore reads
    (`AWS_ENDPOINT`, `AWS_ACCESS_KEY_ID`, `GOOGLE_SERVICE_ACCOUNT`, `AZURE_STORAGE_ACCOUNT_KEY` …).

    Args:
        endpoint: address of a store that is not the cloud's own, such as `http://127.0.0.1:9000`.
        config: further settings by obstore's names (`region`, `access_key_id`, `skip_signature` …).
        timeout_s: the longest that one request may take, with its body.
        connect_s: the longest that connecting may take.
        retry_s: for how long a request that failed in passing is tried again.
        hold_s: after this long without a sign of life a holder on another machine counts as dead.
    """

    endpoint: str | None = None
    config: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = 60.0
    connect_s: float = 5.0
    retry_s: float = 120.0
    hold_s: float = 30.0


@final
class Version(msgspec.Struct, frozen=True):
    """Which bytes lie under a name just now, as an object store tells it."""

    e_tag: str | None
    number: str | None


@final
@dataclass(frozen=True, slots=True)
class Upload:
    """A part that somebody began to send and never finished; `key` is the store's own name for it."""

    names: tuple[str, ...]
    key: str


class Hold(ABC):
    """The mark of a live process on a name; it ends with the process."""

    @property
    def lost(self) -> bool:
        """Whether another process took the name, this one having given no sign of life for too long."""
        return False

    @abstractmethod
    def close(self, *, remove: bool = False) -> None:
        """End it; with `remove` the name goes too."""


class PartWriter(ABC):
    """Writes one part from any number of threads, each range once; `close` in any case."""

    path: str
    size: int

    @abstractmethod
    def write(self, data: memoryview, offset: int) -> None:
        """Write a range. It may still be read from `data` until `sync` or `close` has returned.

        Ranges begin at multiples of a block and are one block long, except for the last. Blocks: while more
        is under way than the store takes at once. Fails: StorageError.
        """

    @abstractmethod
    def sync(self) -> None:
        """Make every byte written so far durable; a part has all its bytes by then. Fails: StorageError."""

    @abstractmethod
    def close(self) -> None:
        """Give up what is not synced, and release everything."""


class PartReader(ABC):
    """Reads ranges of one part from any number of threads; `close` in any case."""

    path: str
    size: int

    @abstractmethod
    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill an ALIGN-aligned buffer from an ALIGN-aligned offset; fewer bytes only at the end."""

    @abstractmethod
    def read(self, offset: int, length: int) -> bytes:
        """A small range."""

    def descriptor(self) -> int | None:
        """What reads as `read_into` does, for one reading now, by code that asks the system itself.

        None where only `read_into` will do.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Release everything."""


class Store(ABC):
    """A place for checkpoints. Every method fails with StorageError; those that wait have a deadline.

    `root` names it: a path, or the URL that `opened` takes. `poll_s` is how often it is sensible to look for
    a change, `at_once` how many requests it pays to have under way. `has_locks` says that a live writer is
    known by its lock: where it is False, writers announce themselves (`hold`), count as dead after `hold_s`
    of silence, and whoever removes what they left must revoke their save first.
    """

    root: str
    poll_s: float
    at_once: int
    has_locks: bool
    hold_s: float

    @abstractmethod
    def path(self, *names: str) -> str:
        """The full name of what lies under these names. Fails: UsageError for an illegal one."""

    @abstractmethod
    def below(self, *names: str) -> Self:
        """The store whose root is a folder of this one."""

    # ---- folders

    @abstractmethod
    def make_root(self) -> None:
        """Make the place ready for saves, durably, and refuse one that cannot keep the promises."""

    @abstractmethod
    def make_folder(self, *names: str) -> None:
        """Create a folder, durably; nothing happens if it is there."""

    @abstractmethod
    def remove_folder(self, *names: str) -> None:
        """Remove an empty folder."""

    @abstractmethod
    def sync_folder(self, *names: str) -> None:
        """Make the entries of a folder durable."""

    @abstractmethod
    def names(self, *names: str) -> list[str]:
        """The entries of a folder, sorted; empty if there is none."""

    @abstractmethod
    def walk(self) -> Iterator[tuple[str, ...]]:
        """The names of all files below the root, however deep."""

    @abstractmethod
    def exists(self, *names: str) -> bool:
        """Whether a file of that name is there."""

    @abstractmethod
    def having(self, folders: Sequence[str], name: str) -> list[str]:
        """Those of the folders below the root that hold a file of that name."""

    @abstractmethod
    def size(self, *names: str) -> int | None:
        """The size of a file, or None."""

    @abstractmethod
    def is_place(self) -> bool:
        """Whether there is something to look into. Creates nothing."""

    # ---- small files

    @abstractmethod
    def read(self, *names: str, max_bytes: int) -> bytes:
        """A whole file; refused before any memory is taken if it is larger than `max_bytes`."""

    @abstractmethod
    def create(self, *names: str, data: bytes) -> bool:
        """Create a file with `data` if the name is free, durably; False if it is taken. Atomic."""

    @abstractmethod
    def replace(self, *names: str, data: bytes, expected: Version | None = None) -> bool:
        """Put `data` under a name, durably: a reader sees the old file or the new one. Atomic.

        With `expected`, only over exactly that version: False if something else lies there by now.
        """

    @abstractmethod
    def version(self, *names: str) -> Version | None:
        """Which bytes lie there now, for `replace`; None if nothing does or the store cannot tell."""

    @abstractmethod
    def remove(self, *names: str) -> bool:
        """Remove a file; False if it was not there. Not durable until the folder is synced."""

    @abstractmethod
    def remove_all(self, folder: str, names: Sequence[str]) -> None:
        """Remove files of one folder, in that order; those that are not there are passed over."""

    # ---- who is at work

    @abstractmethod
    def hold(self, *names: str, exclusive: bool, holder: str = "") -> Hold | None:
        """Mark a name as held by this process; None if another live one holds it and `exclusive` is asked.

        Without `exclusive` the mark is simply renewed. `holder` is told to whoever is refused.
        """

    @abstractmethod
    def holder(self, *names: str) -> str:
        """What the last holder of a name said of itself; empty if it is not known."""

    @abstractmethod
    def is_written(self, *names: str) -> bool:
        """Whether a live process is writing this file or holds this name."""

    @abstractmethod
    def is_busy(self, *names: str) -> bool:
        """Whether a live process is writing or reading this file."""

    @abstractmethod
    def age_s(self, *names: str) -> float | None:
        """Seconds since a file was written, by the clock of the store; None if it is not there."""

    # ---- parts

    @abstractmethod
    def write_part(self, *names: str, size: int, recycled: Sequence[str] | None = None) -> PartWriter:
        """A writer for a file of exactly `size` bytes, in a folder that is made where it is missing.

        `recycled` names an old file to be overwritten.
        """

    @abstractmethod
    def open_part(self, *names: str, direct: bool = True, ahead: bool = True) -> PartReader:
        """A reader of a part.

        `direct` asks to bypass the page cache of a file system; `ahead` lets a store that is far away ask for
        what follows when one range is read after the other.
        """

    @abstractmethod
    def uploads(self) -> list[Upload]:
        """The parts below the root that were begun and not finished, where the store keeps such things."""

    @abstractmethod
    def drop_upload(self, upload: Upload) -> None:
        """Free what an unfinished part holds."""


def check_names(names: Sequence[str]) -> None:
    """UsageError unless every component is one: nothing can leave the root."""
    for name in names:
        if not name or name in (".", "..") or "/" in name or "\0" in name:
            raise UsageError(f"not a legal name inside a checkpoint folder: {name!r}")


PROBE = "probe-"
"""Prefix of the objects that show whether a store honours conditional puts; a crash may leave one."""

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "memory")
"""Those of object stores."""


def is_url(place: str | os.PathLike[str]) -> bool:
    """Whether a place is an object store's URL, not a folder."""
    scheme, separator, _ = os.fspath(place).partition("://")
    return bool(separator) and scheme != "file"


_PASSING: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.ESTALE}
)
"""What a file system answers that has nothing against the file. A disk that cannot read it says EIO."""


def is_trouble(store: Store, error: HoldfastError) -> bool:
    """Whether an error tells of the store or of this process, and nothing of what lies there."""
    if not isinstance(error, StorageError) or isinstance(error, MissingPathError):
        return False
    return not store.has_locks or error.errno in _PASSING
