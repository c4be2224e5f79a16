"""Staged state for whoever needs it: a vault publishes what lies in its slots, a restarted trainer takes it.

A slot is offered from the moment its save is staged until the next save begins in it. Before that save may
write, readers are cut off and the trainer is told (Begun), so nobody can take a state that is half old and
half new. A vault whose trainer died goes on offering for `linger_s`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np

from holdfast.arrays import Bytes1D
from holdfast.errors import HoldfastError
from holdfast.transfer import Endpoint, Publication, PublishedTree
from holdfast.vault.arena import Slot
from holdfast.vault.messages import Order, Recipe, ServeAt

log = logging.getLogger("holdfast.vault")

_NAME: Final = "state"
_LEASE_S: Final = 7 * 86400.0


@final
class Restores:
    """What one vault offers."""

    def __init__(self, serve: ServeAt) -> None:
        self._serve = serve
        self._endpoint = Endpoint(serve.bind, run=serve.run, token=serve.token, name="vault")
        self._offered: dict[int, Publication] = {}
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        return self._endpoint.address

    @property
    def linger_s(self) -> float:
        """How long to go on after the trainer died; 0 if there is nothing to offer."""
        return self._serve.linger_s if self._offered else 0.0

    def offer(self, order: Order, recipe: Recipe, slot: Slot) -> None:
        """Publish a save that is staged. Failing to is no failure of the save."""
        try:
            found = self._endpoint.publish_slices(
                _NAME, _published(order, recipe, slot), order.save.step, lease_s=_LEASE_S, keep=64
            )
        except HoldfastError as error:
            log.warning("step %d is not offered for restores: %s", order.save.step, error.message)
            return
        with self._lock:
            self._offered[order.slot] = found

    def withdraw(self, slot: int) -> None:
        """Cut off whoever reads from a slot: it is about to be written. Returns when nobody does."""
        with self._lock:
            found = self._offered.pop(slot, None)
        if found is not None:
            found.revoke("its memory is needed for the next save")

    def close(self) -> None:
        self._endpoint.close()


def _published(order: Order, recipe: Recipe, slot: Slot) -> PublishedTree:
    """The slices of a staged part, by array."""
    memory = np.frombuffer(slot.view, np.uint8)
    entries = {entry.name: entry for entry in recipe.arrays}
    tree = PublishedTree()
    for entry in sorted(entries.values(), key=lambda one: one.name):
        pieces: list[tuple[tuple[tuple[int, int], ...], Bytes1D]] = [
            (
                tuple(zip(piece.start, piece.stop, strict=True)),
                memory[piece.offset : piece.offset + piece.nbytes],
            )
            for piece in recipe.slices
            if piece.name == entry.name
        ]
        tree.add_array(entry.name, entry.dtype, entry.shape, pieces, kind=entry.kind, impl=entry.impl)
    for scalar in order.scalars:
        tree.add_scalar(scalar.name, scalar.type, scalar.value)
    return tree


class Restored(NamedTuple):
    """A state from the memory of vaults, and the step it belongs to."""

    step: int
    tree: Any


def restore(
    vaults: Sequence[str],
    into: Any = None,
    *,
    step: int | None = None,
    run: str = "run",
    token: bytes | None = None,
    rank: int = 0,
    world: int = 1,
    timeout_s: float = 60.0,
) -> Restored:
    """The newest step that all vaults hold (or `step`), on the template's mesh, verified.

    `vaults` are the addresses of all vaults that hold slices of the state. Fails: TransferError and its
    kinds, MismatchError.
    """
    with Endpoint("127.0.0.1:0", run=run, token=token, name="restore") as endpoint:
        plan = endpoint.prepare(list(vaults), _NAME, into=into, rank=rank, world=world, timeout_s=timeout_s)
        result = plan.run(version=step, deadline_s=timeout_s).result()
        return Restored(result.version, result.tree)
