"""Lanes on their way into the sums: small ones in the call that adds them, large ones beside the caller.

A large lane is taken over: `add` returns, and threads (`workers`) bring its arrays to the host and fold them
while the caller computes the next lane. One lane at a time is on its way; whoever adds another one, or asks
for what is folded, waits for it first, and is told what it failed with. Arrays of a framework are held until
they are in host memory. numpy arrays can be written by their owner as soon as `add` has returned: a few bytes
of them are copied, and with more than that the lane is folded, by the same threads, before it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import numpy as np

from holdfast import faults
from holdfast.clock import Deadline
from holdfast.errors import UsageError
from holdfast.reduce.adder import Scratch
from holdfast.reduce.exchange import Watch
from holdfast.reduce.folding import Fold, Folder
from holdfast.reduce.layout import FlatLayout
from holdfast.reduce.leaves import Leaf, read
from holdfast.reduce.workers import Workers

INLINE_BYTES: Final = 4 << 20
"""Lanes below this are folded in the call. Measured: handing one over and waiting for it costs 50 to 200 us
more, which from 4 MiB on is lost in the folding."""
COPIED_BYTES: Final = 1 << 20
"""Of numpy arrays in a lane that is taken over."""
FOLD_S: Final = 3600.0
"""How long a lane may take to be computed and folded. Who supervises finds a hang long before."""


@final
class Intake:
    """One thread at a time calls it."""

    def __init__(
        self, folder: Folder, scratch: Scratch, *, num_threads: int, inline_bytes: int, name: str
    ) -> None:
        self._folder, self._scratch, self._inline_bytes = folder, scratch, inline_bytes
        self._workers = Workers(num_threads, name)
        self._closed = False

    def add(self, lane: int, layout: FlatLayout, leaves: Sequence[Leaf]) -> None:
        """Take a lane. Blocks: until the one before it is folded; for a small one, until it is itself.

        Fails: as `settle` for the one before it, as `Folder.open`, and what a small one fails with.
        """
        self.settle()
        if self._closed:
            raise UsageError(f"lane {lane} is added to a reducer that is closed")
        if layout.nbytes < self._inline_bytes:
            self._folder.add(lane, [read(leaf) for leaf in leaves], layout, self._scratch)
            faults.site("reduce.folded")
            return
        writable = [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]
        at_once = sum(leaf.nbytes for leaf in writable) > COPIED_BYTES
        if writable and not at_once:
            leaves = [leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
        self._workers.hire()
        fold = self._folder.open(lane, layout)
        try:
            self._workers.start(fold, leaves, self._folded, self._folder.drop)
            if at_once:
                self.settle()
        except BaseException:
            self._workers.give_up()  # whoever was interrupted here may write its arrays
            raise

    def _folded(self, fold: Fold) -> None:
        self._folder.close(fold)
        faults.site("reduce.folded")

    def settle(self, watch: Watch | None = None) -> None:
        """Return when no lane is on its way.

        Blocks: until it is computed and folded, as long as `watch` says. Fails: what folding it failed with,
        once; DeadlineError.
        """
        lane = self._workers.lane
        if lane is not None and watch is not None:
            watch.own(self._workers.idle, f"lane {lane}")
        elif lane is not None:
            self._await_idle(f"lane {lane} to be computed and folded")
        error = self._workers.error()
        if error is not None:
            raise error

    def give_up(self) -> None:
        """Return when no lane is on its way; one that is gets dropped, whatever it fails with.

        Blocks: while it is computed. Fails: DeadlineError.
        """
        if (lane := self._workers.lane) is not None:
            self._workers.give_up()
            self._await_idle(f"lane {lane} to be computed")
        self._workers.error()

    def _await_idle(self, what: str) -> None:
        deadline = Deadline(FOLD_S)
        while not self._workers.idle(deadline.remaining()):
            deadline.check(what)

    def close(self) -> None:
        """End the threads. Blocks: as `Workers.close`."""
        self._closed = True
        self._workers.close()
