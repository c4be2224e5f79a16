"""What a vault offers to others: its catalogue, and every state that it holds, by reference.

Each rank's states have an endpoint of their own: a restore puts the parts of all ranks together, taking one
publication from each endpoint, also where several ranks' parts lie in one vault. The first rank shares the
endpoint of the catalogue, which is the vault's address. A state is published twice without a copy: as the
slices of its arrays, for restores on any mesh, and as the image of its part file, for a neighbour's copy.
"""

from __future__ import annotations

import threading
from typing import Final, NamedTuple, final

import msgspec
import numpy as np

from holdfast.arrays import Bytes1D
from holdfast.transfer import Endpoint, Publication, PublishedTree
from holdfast.vault.catalogue import CATALOGUE, ENTRIES, Held, encode_catalogue, offered
from holdfast.vault.messages import Order, Recipe, ServeAt

_LEASE_S: Final = 7 * 86400.0
_CATALOGUE_LEASE_S: Final = 300 * 86400.0
_KEEP: Final = 64
STATE: Final = "state"
IMAGE: Final = "image"
ABOUT: Final = "about"


class Owner(NamedTuple):
    """Whose states: those of one rank's saves to one folder, on this node or copied from `origin`."""

    origin: str
    folder: str
    rank: int


class About(msgspec.Struct, frozen=True):
    """What a neighbour has to know of an image besides its bytes."""

    rank: int
    world: int
    folder: str
    order: Order
    recipe: Recipe


def state_name(attempt: str) -> str:
    """The name of a save's state at the endpoint of its rank."""
    return f"{STATE}/{offered(attempt).name}"


def image_name(attempt: str) -> str:
    return f"{IMAGE}/{offered(attempt).name}"


class Published(NamedTuple):
    """A state that is offered; `revoke` before its memory changes."""

    address: str
    publications: tuple[Publication, ...]

    def revoke(self, reason: str) -> None:
        """Cut off whoever reads it. Returns when nobody does."""
        for one in self.publications:
            one.revoke(reason)


@final
class Offers:
    """The endpoints of one vault, all with the run's token."""

    def __init__(self, serve: ServeAt) -> None:
        self.serve = serve
        self.front = Endpoint(serve.bind, run=serve.run, token=serve.token, name="vault")
        self._host = serve.bind.removeprefix("tcp://").rpartition(":")[0]
        self._by_owner: dict[Owner, Endpoint] = {}
        self._lock = threading.Lock()
        self._changes = 0
        self._closed = False
        self.list(())

    @property
    def address(self) -> str:
        return self.front.address

    def list(self, entries: tuple[Held, ...]) -> None:
        """Publish the catalogue, in the order in which the states were staged."""
        with self._lock:
            if self._closed:
                return
            self._changes += 1
            tree = PublishedTree()
            tree.add_scalar(ENTRIES, "str", encode_catalogue(entries))
            self.front.publish_slices(CATALOGUE, tree, self._changes, lease_s=_CATALOGUE_LEASE_S, keep=_KEEP)

    def offer(self, owner: Owner, about: About, memory: Bytes1D, fd: int | None = None) -> Published:
        """Publish a state; `fd` is the memfd that its memory maps from its beginning, if it is one.

        Fails: HoldfastError, then nothing is offered.
        """
        endpoint = self._endpoint(owner)
        attempt = about.order.save.attempt
        version = offered(attempt).version
        state = endpoint.publish_slices(
            state_name(attempt), _slices(about, memory, fd), version, lease_s=_LEASE_S, keep=_KEEP
        )
        image = endpoint.publish_slices(
            image_name(attempt), _image(about, memory), version, lease_s=_LEASE_S, keep=_KEEP
        )
        return Published(endpoint.address, (state, image))

    def _endpoint(self, owner: Owner) -> Endpoint:
        with self._lock:
            found = self._by_owner.get(owner)
            if found is None:
                found = self.front
                if self._by_owner:
                    found = Endpoint(
                        f"{self._host}:0", run=self.serve.run, token=self.serve.token, name="vault"
                    )
                self._by_owner[owner] = found
            return found

    def close(self) -> None:
        """End all endpoints, and with them every transfer."""
        with self._lock:
            self._closed = True
            endpoints = {id(one): one for one in (self.front, *self._by_owner.values())}
        for one in endpoints.values():
            one.close()


def _slices(about: About, memory: Bytes1D, fd: int | None) -> PublishedTree:
    """The slices of a staged part, by array."""
    pieces: dict[str, list[tuple[tuple[tuple[int, int], ...], Bytes1D]]] = {}
    for piece in about.recipe.slices:
        box = tuple(zip(piece.start, piece.stop, strict=True))
        pieces.setdefault(piece.name, []).append((box, memory[piece.offset : piece.offset + piece.nbytes]))
    tree = PublishedTree(None if fd is None else (fd, memory))
    for entry in about.recipe.arrays:
        tree.add_array(
            entry.name,
            entry.dtype,
            entry.shape,
            pieces.get(entry.name, []),
            kind=entry.kind,
            impl=entry.impl,
        )
    for scalar in about.order.scalars:
        tree.add_scalar(scalar.name, scalar.type, scalar.value)
    return tree


def _image(about: About, memory: Bytes1D) -> PublishedTree:
    """The whole image of a part, and what it is."""
    described = np.frombuffer(msgspec.msgpack.encode(about), np.uint8)
    tree = PublishedTree()
    for name, data in ((ABOUT, described), (IMAGE, memory)):
        tree.add_array(name, "uint8", (data.size,), [(((0, data.size),), data)])
    return tree
