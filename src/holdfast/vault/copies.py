"""Copies of a neighbour's states: this vault follows the other's catalogue and takes what is new in it.

The one that keeps the copy pulls it, so the one that stages never waits for its neighbour, and a neighbour
that is slow or gone costs it nothing. When the other node is lost, what was copied stays, and is offered like
an own state.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Final, final

import msgspec
import numpy as np

from holdfast.arrays import Bytes1D
from holdfast.errors import HoldfastError, StalledError, UsageError, VaultError, VersionGoneError
from holdfast.transfer import Endpoint, TransferPlan
from holdfast.vault.catalogue import CATALOGUE, ENTRIES, Held, decode_catalogue, offered, to_copy
from holdfast.vault.holdings import Holdings, State
from holdfast.vault.neighbourhood import address_in
from holdfast.vault.offers import ABOUT, IMAGE, About, Owner, image_name

log = logging.getLogger("holdfast.vault")

_LISTEN_S: Final = 30.0
"""One look at the catalogue waits so long for a change of it."""
_COPY_S: Final = 600.0
_RETRY_S: Final = 0.5

_ABOUT: Final = msgspec.msgpack.Decoder(About)


@final
class Copier:
    """Keeps copies of the newest states of one other vault, on its own thread, until `close`."""

    def __init__(self, holdings: Holdings, endpoint: Endpoint, node: str, where: str) -> None:
        self._holdings = holdings
        self._endpoint = endpoint
        self._node = node
        self._where = where
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"holdfast-copies {node}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Copy nothing more; what was copied stays. The thread ends with its endpoint at the latest."""
        self._stop.set()

    def _run(self) -> None:
        connected = False
        while not self._stop.is_set():
            try:
                with self._endpoint.prepare(address_in(self._where), CATALOGUE, timeout_s=_LISTEN_S) as plan:
                    connected = True
                    self._follow(plan)
            except HoldfastError as error:
                if self._stop.is_set():
                    return
                if connected:
                    log.warning("the vault of node %s is gone: %s", self._node, error.message)
                    self._holdings.verify(lambda owner: owner.origin == self._node, _report)
                connected = False
            self._stop.wait(_RETRY_S)

    def _follow(self, plan: TransferPlan) -> None:
        """Copy what the catalogue lists, whenever it changes. Fails: HoldfastError when the vault is gone."""
        seen: int | None = None
        while not self._stop.is_set():
            try:
                found = plan.run(seen, _LISTEN_S).result()
            except (VersionGoneError, StalledError):
                if seen is None:
                    raise
                seen = None  # nothing new in this time, or more than one change: look at the newest
                continue
            for one in to_copy(decode_catalogue(str(found.tree[ENTRIES]))):
                if self._stop.is_set():
                    return
                self._copy(one)
            seen = found.version + 1

    def _copy(self, one: Held) -> None:
        """Take one state. Not getting it is no failure: there will be a newer one."""
        if self._holdings.has(Owner(self._node, one.folder, one.rank), one.attempt):
            return
        if not self._holdings.room_for(one.nbytes):
            log.warning("no room for a copy of step %d of node %s", one.step, self._node)
            return
        try:
            about, image = self._pull(one)
        except (HoldfastError, msgspec.MsgspecError) as error:
            log.info("step %d of node %s is not copied: %s", one.step, self._node, error)
            return
        owner = Owner(self._node, about.folder, about.rank)
        self._holdings.copied(owner, about, image)

    def _pull(self, one: Held) -> tuple[About, Bytes1D]:
        name = image_name(one.attempt)
        with self._endpoint.prepare(one.address, name, timeout_s=_LISTEN_S) as plan:
            tree = plan.run(offered(one.attempt).version, _COPY_S).result().tree
        about = _ABOUT.decode(np.asarray(tree[ABOUT]).tobytes())
        image: Bytes1D = np.asarray(tree[IMAGE])
        save = about.order.save
        if (save.step, save.attempt) != (one.step, one.attempt) or about.recipe.size != image.size:
            raise VaultError(f"the vault of node {self._node} sent another state than it lists")
        return about, image


def _report(state: State, block: int) -> None:
    log.error(
        "the copy of step %d from node %s: block %d is not what arrived",
        state.step,
        state.owner.origin,
        block,
    )


@final
class Copiers:
    """The neighbours whose states are copied here; told at any time, begun once states are offered.

    `expected`: there may be some at any time, also while there are none.
    """

    def __init__(self, holdings: Holdings, *, expected: bool = False) -> None:
        self._holdings = holdings
        self._expected = holdings.copies = expected
        self._lock = threading.Lock()
        self._endpoint: Endpoint | None = None
        self._wanted: dict[str, str] = {}
        self._running: dict[str, Copier] = {}

    def copy_from(self, node: str, address: str) -> None:
        """Keep copies of that node's states from now on; with an empty address, copy nothing more."""
        if not node:
            raise UsageError("a neighbour has a name", hint="NODE=ADDRESS")
        with self._lock:
            running = self._running.pop(node, None)
            if running is not None:
                running.close()
            self._wanted.pop(node, None)
            if address:
                self._wanted[node] = address
                self._begin(node)
            self._holdings.copies = self._expected or bool(self._wanted)

    def copy_only(self, neighbours: Mapping[str, str]) -> None:
        """Keep copies of the states of these nodes, and of no others."""
        with self._lock:
            before = dict(self._wanted)
        for node in before.keys() - neighbours.keys():
            self.copy_from(node, "")
        for node, address in neighbours.items():
            if before.get(node) != address:
                self.copy_from(node, address)

    def open(self, endpoint: Endpoint) -> None:
        """There is an endpoint to pull with."""
        with self._lock:
            self._endpoint = endpoint
            for node in self._wanted:
                self._begin(node)

    def _begin(self, node: str) -> None:
        if self._endpoint is not None and node not in self._running:
            self._running[node] = Copier(self._holdings, self._endpoint, node, self._wanted[node])

    def close(self) -> None:
        with self._lock:
            for one in self._running.values():
                one.close()
            self._running.clear()
