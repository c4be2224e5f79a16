"""One live writer per rank and folder: two runs must not share a checkpoint folder unnoticed.

Where a live process is known by its lock, every rank holds one. An object store has no locks: rank 0 alone
gives signs of life there, for the whole run.
"""

from __future__ import annotations

import os
import socket
import time
from typing import final

from holdfast.clock import Deadline
from holdfast.errors import LeaseError
from holdfast.storage import Hold, Store
from holdfast.vault import WORK


@final
class Lease:
    """The right of this process to write as `rank`; it ends with the process.

    Blocks: on an object store whose holder may have died on another machine, until that is known, which
    takes `wait_s` at most. Fails: LeaseError.
    """

    def __init__(self, store: Store, rank: int, *, wait_s: float | None = None) -> None:
        """`wait_s` is somewhat more than the store's `hold_s` unless given."""
        self._hold: Hold | None = None
        self._place = store.root
        store.make_root()
        store.make_folder(WORK)
        if not store.has_locks and rank != 0:
            return
        name = f"writer-{rank}.lock"
        deadline, me = (
            Deadline(1.5 * store.hold_s if wait_s is None else wait_s),
            f"process {os.getpid()} on {socket.gethostname()}",
        )
        seen = None if store.has_locks else store.version(WORK, name)
        while (hold := store.hold(WORK, name, exclusive=True, holder=me)) is None:
            beating = not store.has_locks and store.version(WORK, name) != seen
            if deadline.expired() or beating:
                raise LeaseError(
                    f"{store.root} is being written by {store.holder(WORK, name) or 'another process'}",
                    hint="give each run its own folder, or end the other run first",
                )
            time.sleep(min(store.poll_s, deadline.remaining()))
        self._hold = hold

    def check(self) -> None:
        """Fails: LeaseError if another run has taken it, this process having been silent for too long."""
        if self._hold is not None and self._hold.lost:
            raise LeaseError(
                f"{self._place} was taken over while this process gave no sign of life",
                hint="another run saves there now; end this one, or give it a place of its own",
            )

    def close(self) -> None:
        """Give the right back."""
        if self._hold is not None:
            self._hold.close()
            self._hold = None
