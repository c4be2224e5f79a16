"""Where an export goes: a folder that appears when it is whole, or a prefix whose index comes last.

An export to a prefix holds a lease there, and a record of its files lies beside them until all are written.
A record without a live holder is what a dead export left: the next one removes those files and no others.
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, final

import msgspec

from holdfast.checkpoint.lease import Lease
from holdfast.errors import FormatError, HoldfastError, LeaseError, MissingPathError, StorageError, UsageError
from holdfast.storage import PROBE, LocalStore, Store, StoreOptions, is_url, opened
from holdfast.vault import WORK

log = logging.getLogger("holdfast.checkpoint")

_HELD: Final = ".writing"
_STALE_S: Final = 3600.0
_EXPORT: Final = "export"
_RECORD: Final = "files"
_MAX_RECORD: Final = 1 << 28


class _Record(msgspec.Struct, frozen=True):
    """The files of an export under way, in the order of writing: the last makes them a repository."""

    export: str
    names: list[str]


def check_free(place: str | os.PathLike[str], options: StoreOptions | None) -> None:
    """Fails: UsageError unless the place is empty, not there, or one that an export has not finished."""
    if is_url(place):
        store = opened(place, options)
        taken = not store.exists(WORK, _EXPORT, _RECORD) and not _is_empty(store)
    else:
        path = opened(place).root
        taken = os.path.lexists(path) and (not os.path.isdir(path) or bool(os.listdir(path)))
    if taken:
        raise UsageError(f"{os.fspath(place)} is not empty", hint="export into a new or empty folder")


def _is_empty(store: Store) -> bool:
    names = store.names()
    if names == [WORK]:  # signs of life, which a killed export may leave before it has any file
        names = [name for name in store.names(WORK) if name != _EXPORT and not name.startswith(PROBE)]
    return not names


@final
class Target:
    """A store that an export writes into. `names` are the files there that are its own."""

    def __init__(self, store: Store, record: bytes | None = None) -> None:
        self.store = store
        self.names: list[str] = []
        self._record = record

    def begin(self, name: str) -> None:
        """Count a file as its own that is written next. Fails: LeaseError if the place was taken over."""
        if not self.is_held():
            raise LeaseError(
                f"{self.store.root} was taken over while this process gave no sign of life",
                hint="another export goes there now; give this one a place of its own",
            )
        self.names.append(name)

    def is_held(self) -> bool:
        """Whether no other export has taken the place."""
        return self._record is None or _recorded(self.store) == self._record


@contextmanager
def target(
    place: str | os.PathLike[str], names: Sequence[str], options: StoreOptions | None
) -> Iterator[Target]:
    """An empty store that becomes the place when the block ends without an error.

    `names` are all files that the block is going to write, the one last that makes them a repository. Fails:
    LeaseError where another live export goes to the same place.
    """
    with _prefix(place, names, options) if is_url(place) else _folder(place) as made:
        yield made


@contextmanager
def _prefix(
    place: str | os.PathLike[str], names: Sequence[str], options: StoreOptions | None
) -> Iterator[Target]:
    store = opened(place, options)
    work = store.below(WORK, _EXPORT)
    try:
        lease = Lease(work, 0)
    except LeaseError as error:
        raise _busy(store.root) from error
    try:
        _remove_left(store)
        check_free(place, options)
        record = msgspec.json.encode(_Record(uuid.uuid4().hex, list(names)))
        work.create(_RECORD, data=record)
        made = Target(store, record)
        try:
            yield made
        except BaseException:
            with suppress(HoldfastError):  # what cannot be removed now stays on record, for the next export
                if made.is_held():
                    _remove(store, made.names)
            raise
        work.remove(_RECORD)
    finally:
        lease.close()
    with suppress(HoldfastError):
        for left in list(work.walk()):
            work.remove(*left)


def _recorded(store: Store) -> bytes | None:
    try:
        return store.read(WORK, _EXPORT, _RECORD, max_bytes=_MAX_RECORD)
    except MissingPathError:
        return None


def _remove_left(store: Store) -> None:
    """Remove what a dead export left; a repository that it finished stays, and only its record goes."""
    data = _recorded(store)
    if data is None:
        return
    try:
        names = msgspec.json.decode(data, type=_Record).names
    except msgspec.MsgspecError as error:
        path = store.path(WORK, _EXPORT, _RECORD)
        raise FormatError(f"{path} is not the record of an export: {error}", hint="remove it") from None
    whole = bool(names) and store.exists(names[-1])
    _remove(store, [] if whole else names)


def _remove(store: Store, names: Sequence[str]) -> None:
    """Remove files of an export, its unfinished uploads, and then its record. Fails: StorageError."""
    try:
        for upload in store.uploads():
            if len(upload.names) == 1 and upload.names[0] in names:
                store.drop_upload(upload)
    except HoldfastError as error:  # not everybody may list them
        log.warning("%s", error)
    for name in reversed(names):  # first of all what makes them a repository
        store.remove(name)
    store.remove(WORK, _EXPORT, _RECORD)


@contextmanager
def _folder(place: str | os.PathLike[str]) -> Iterator[Target]:
    check_free(place, None)
    final_ = os.path.abspath(opened(place).root)
    parent, name = os.path.split(final_)
    LocalStore(parent).make_root()
    _remove_stale(parent, name)
    made = LocalStore(os.path.join(parent, f".{name}.hub-{uuid.uuid4().hex[:12]}"))
    made.make_root()
    held = made.hold(_HELD, exclusive=True)
    try:
        if held is None:
            raise _busy(final_)
        yield Target(made)
        held.close(remove=True)
        made.sync_folder()
        try:
            os.rename(made.root, final_)
        except OSError as error:
            raise StorageError.from_os(error, doing="export to", path=final_) from error
        LocalStore(parent).sync_folder()
    except BaseException:
        if held is not None:
            held.close()
        shutil.rmtree(made.root, ignore_errors=True)
        raise


def _remove_stale(parent: str, name: str) -> None:
    """Remove what an export to the same folder left that was killed. Fails: LeaseError if one is alive."""
    for one in os.listdir(parent):
        path = os.path.join(parent, one)
        if one.startswith(f".{name}.hub-") and os.path.isdir(path):
            left = LocalStore(path)
            if left.is_written(_HELD):
                raise _busy(os.path.join(parent, name))
            old = (left.age_s() or 0.0) > _STALE_S  # none: another export has just put it into its place
            if left.exists(_HELD) or old:
                shutil.rmtree(path, ignore_errors=True)


def _busy(place: str) -> LeaseError:
    return LeaseError(
        f"another export is writing to {place}", hint="give this one another place, or let that one end"
    )
