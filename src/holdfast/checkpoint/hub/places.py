"""Where an export goes: a folder that appears when it is whole, or a prefix whose index comes last."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from holdfast.errors import HoldfastError, StorageError, UsageError
from holdfast.storage import LocalStore, Store, StoreOptions, is_url, opened

_HELD: Final = ".writing"
_STALE_S: Final = 3600.0


def check_free(place: str | os.PathLike[str], options: StoreOptions | None) -> None:
    """Fails: UsageError unless the place is empty or not there."""
    if is_url(place):
        taken = bool(opened(place, options).names())
    else:
        path = opened(place).root
        taken = os.path.lexists(path) and (not os.path.isdir(path) or bool(os.listdir(path)))
    if taken:
        raise UsageError(f"{os.fspath(place)} is not empty", hint="export into a new or empty folder")


@contextmanager
def target(place: str | os.PathLike[str], options: StoreOptions | None) -> Iterator[tuple[Store, list[str]]]:
    """An empty store that becomes the place when the block ends without an error.

    The block puts each name on the list before it is written: on an object store those are removed again
    where it fails.
    """
    check_free(place, options)
    if is_url(place):
        store = opened(place, options)
        names: list[str] = []
        store.make_root()
        try:
            yield store, names
        except BaseException:
            for name in reversed(names):  # first of all what makes them a repository
                with suppress(HoldfastError):
                    store.remove(name)
            raise
        return
    final_ = os.path.abspath(opened(place).root)
    parent, name = os.path.split(final_)
    LocalStore(parent).make_root()
    _remove_stale(parent, name)
    made = LocalStore(os.path.join(parent, f".{name}.hub-{uuid.uuid4().hex[:12]}"))
    made.make_root()
    held = made.hold(_HELD, exclusive=True)
    try:
        yield made, []
        if held is not None:
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
    """Remove what an export to the same folder left that was killed."""
    for one in os.listdir(parent):
        path = os.path.join(parent, one)
        if one.startswith(f".{name}.hub-") and os.path.isdir(path):
            left = LocalStore(path)
            old = (left.age_s() or 0.0) > _STALE_S  # none: another export has just put it into its place
            if not left.is_written(_HELD) and (left.exists(_HELD) or old):
                shutil.rmtree(path, ignore_errors=True)
