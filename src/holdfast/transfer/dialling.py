"""Dialling an address: one does it, and the others that want the same wait for what comes of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from copy import copy
from typing import Final, final

from holdfast.errors import HandshakeError, HoldfastError, PeerLostError, StalledError
from holdfast.transfer.links import Address
from holdfast.transfer.patience import Patience

_LOOK_S: Final = 0.05


@final
class Dialling:
    """Lets one thread at a time dial an address. If that fails, it has failed for all that waited."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures = 0
        self._failure: HoldfastError = PeerLostError("nobody dialled yet")

    @contextlib.contextmanager
    def turn(self, address: Address, patience: Patience) -> Iterator[None]:
        """A stretch in which nobody else dials.

        Blocks: until it is free, as long as `patience` lasts. Fails: StalledError, TransferCancelled, and as
        the one did that was dialling meanwhile.
        """
        seen = self._failures
        while not self._lock.acquire(timeout=min(_LOOK_S, patience.remaining())):
            patience.check()
            if patience.expired():
                raise StalledError(
                    f"{address}: no connection within {patience.timeout_s:g} s",
                    hint="is the address right, and does a firewall drop packets?",
                )
        try:
            if self._failures != seen:
                raise copy(self._failure)  # with no frames of its own: whoever keeps it keeps nothing else
            with self._noted(patience):
                yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _noted(self, patience: Patience) -> Iterator[None]:
        try:
            yield
        except (PeerLostError, StalledError, HandshakeError) as error:
            # For want of time of its own it failed for nobody else.
            if not patience.expired():
                self._failure = copy(error)
                self._failures += 1
            raise
