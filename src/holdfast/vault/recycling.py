"""Part files of pruned steps, kept to be overwritten.

Overwriting allocated blocks spares the file system most of the work of a fresh file and spares the disk the
discard of the old one. Only files of committed steps come here: their writers have finished and closed them,
so no zombie can hold them open. At most one file per part is kept, so that the space taken never exceeds
what the next save needs anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from holdfast.errors import HoldfastError
from holdfast.format import data_name, parse_file_name
from holdfast.storage import LocalStore, Store

WORK: Final = ".holdfast"
"""The folder below a checkpoint root where Holdfast keeps what is not a checkpoint."""
AGREEMENT: Final = "agreement"
"""The folder below `WORK` where writers of several processes vote."""
_POOL: Final = "recycled"


def take_recycled(store: Store, part: int, size: int) -> Sequence[str] | None:
    """The name of a kept file for this part, None if there is none. The caller moves or loses it."""
    if not isinstance(store, LocalStore):  # nothing is overwritten in place elsewhere
        return None
    for name in store.names(WORK, _POOL):
        parsed = parse_file_name(name)
        if parsed is None or parsed.part != part:
            continue
        kept = store.size(WORK, _POOL, name)
        # A much larger file would hold on to space that the run no longer needs.
        if kept is not None and kept <= 2 * size and not store.is_busy(WORK, _POOL, name):
            return (WORK, _POOL, name)
        with suppress(HoldfastError):
            store.remove(WORK, _POOL, name)
    return None


def keep_for_recycling(store: Store, folder: str, name: str) -> bool:
    """Move a part file of a pruned step to the pool; False if the pool has one for this part."""
    if not isinstance(store, LocalStore):
        return False
    parsed = parse_file_name(name)
    if parsed is None or parsed.kind != "data" or store.is_busy(folder, name):
        return False
    store.make_folder(WORK)
    store.make_folder(WORK, _POOL)
    for kept in store.names(WORK, _POOL):
        other = parse_file_name(kept)
        if other is not None and other.part == parsed.part:
            return False
    store.move((folder, name), (WORK, _POOL, data_name(parsed.part, parsed.attempt)))
    return True
