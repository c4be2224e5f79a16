"""A plan: what to take from which peers, checked once and run many times."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any, Protocol, Self, final

import xxhash

from holdfast import faults
from holdfast.arrays import Adapter, Bytes1D, Layout, Selection, Template, flatten
from holdfast.errors import MismatchError, StalledError, TransferError, UsageError
from holdfast.transfer.borrowing import landings
from holdfast.transfer.buffers import BufferSets, aligned
from holdfast.transfer.futures import Transfer
from holdfast.transfer.legs import PeerRoute
from holdfast.transfer.links import Address
from holdfast.transfer.manifest import Joint, Manifest, joint
from holdfast.transfer.messages import NEWEST, Describe, Described, Forget, Prepare
from holdfast.transfer.patience import Patience
from holdfast.transfer.pulling import PeerLink, Settings
from holdfast.transfer.route import MAX_CHUNKS, routes
from holdfast.transfer.running import Drive
from holdfast.transfer.shards import Shard, ShardSink
from holdfast.transfer.workers import Workers

Batch = tuple[Adapter | None, list[int], list[tuple[Any, list[tuple[int, int, int]], str | None]]]
"""Arrays that one framework makes (None: slices, which are numpy's): where each is in the tree, and its sink,
its (box, start, stop) and the dtype it is cast from."""


class Host(Protocol):
    """What a plan needs of its endpoint."""

    settings: Settings
    workers: Workers

    def link(self, address: Address, patience: Patience) -> tuple[PeerLink, bool]:
        """A link that works, and whether it is new.

        Blocks: until it is connected, as long as `patience` lasts. Fails: PeerLostError, StalledError,
        HandshakeError, TransferCancelled.
        """
        ...

    def next_run(self) -> int: ...

    def forget_plan(self, plan: TransferPlan) -> None: ...


@final
class Tie:
    """A plan's hold on one peer: its route, and the link on which the peer knows it."""

    def __init__(self, host: Host, address: Address, name: str, route: PeerRoute, manifest: Manifest) -> None:
        self.address = address
        self.route = route
        self.number = 0
        self._host = host
        self._name = name
        self.manifest = manifest
        self._link: PeerLink | None = None

    def open_link(self) -> PeerLink:
        assert self._link is not None
        return self._link

    @property
    def link(self) -> PeerLink | None:
        return self._link

    def connect(self, deadline: Patience) -> bool:
        """Make sure that the peer knows the route; whether that took a new connection.

        A peer that was restarted is asked anew what it has. Fails: MismatchError if that is something else.
        """
        if self._link is not None and not self._link.lost:
            return False
        link, fresh = self._host.link(self.address, deadline)
        found = described(link, self._name, deadline, brief=True)
        if found.digest != self.route.route.manifest:
            whole = described(link, self._name, deadline)
            raise MismatchError(
                differences(self.manifest, whole.manifest) or ["the manifests differ"],
                source="publication",
                hint=f"{self.address} publishes other arrays than the plan was made for; prepare a new plan",
            )
        self.prepare(link, deadline)
        return fresh

    def prepare(self, link: PeerLink, deadline: Patience) -> None:
        """Tell the peer the route. Fails: TransferError if it does not take it."""
        number = self._host.next_run()
        route = self.route.route
        placed = self.route.stream.placed() if link.mover.name == "memfd" else ()
        link.ask(
            lambda seq: Prepare(
                seq,
                number,
                self._name,
                route.digest,
                route.manifest,
                route.stream.chunk_bytes,
                route.segments,
                placed,
            ),
            deadline,
            "prepare",
        )
        self.number = number
        self._link = link

    def changes(self, version: int, deadline: Patience) -> list[str]:
        """How a version of the peer differs from what the plan was made for."""
        found = described(self.open_link(), self._name, deadline, version=version)
        return differences(self.manifest, found.manifest)

    def unready(self, buffer: int) -> None:
        """A buffer was given up. Never fails."""
        if self._link is not None:
            self._link.unready(self.number, buffer)

    def forget(self) -> None:
        if self._link is not None:
            self._link.tell(Forget(self.number))


def described(
    link: PeerLink,
    name: str,
    deadline: Patience,
    *,
    version: int = NEWEST,
    brief: bool = False,
    wait_s: float = inf,
) -> Described:
    """What the peer has published. Blocks: until it has, `wait_s` and as long as the deadline allows."""
    allowed_s = min(wait_s, deadline.remaining())
    found: Described = link.ask(
        lambda seq: Describe(seq, name, version, allowed_s, link.ping_s, brief),
        deadline,
        f"describe {name!r}",
    )
    return found


def differences(planned: Manifest, found: Manifest) -> list[str]:
    """What a peer publishes that is not what it published when the plan was made."""
    before = {one.name: one for one in planned.arrays}
    after = {one.name: one for one in found.arrays}
    problems = [f"{name}: not in the publication any more" for name in before.keys() - after.keys()]
    problems += [f"{name}: new in the publication" for name in after.keys() - before.keys()]
    for name in before.keys() & after.keys():
        a, b = before[name], after[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            problems.append(f"{name}: planned as {a.dtype}{list(a.shape)}, now {b.dtype}{list(b.shape)}")
        elif a != b:
            problems.append(f"{name}: the peer holds other slices of it now")
    types = {one.name: one.type for one in planned.scalars}
    now = {one.name: one.type for one in found.scalars}
    problems += [
        f"{name}: a scalar of type {types.get(name)}, now {now.get(name)}"
        for name in types.keys() | now.keys()
        if types.get(name) != now.get(name)
    ]
    return sorted(problems)


def common(links: Sequence[PeerLink], name: str, deadline: Patience, wait_s: float = inf) -> int:
    """The newest version that all peers have; if there is none, the newest that one has."""
    found = [described(link, name, deadline, brief=True, wait_s=wait_s) for link in links]
    shared = set(found[0].versions).intersection(*(one.versions for one in found[1:]))
    return max(shared) if shared else max(one.version for one in found)


@final
class TransferPlan:
    """Which bytes to take from which peers, and buffers for them. Run it any number of times."""

    def __init__(
        self,
        host: Host,
        addresses: Sequence[Address],
        name: str,
        into: Any,
        selection: Selection,
        *,
        rank: int,
        world: int,
        timeout_s: float,
        wait_s: float = inf,
    ) -> None:
        deadline = Patience(timeout_s)
        self.host = host
        self.name = name
        links = [host.link(address, deadline)[0] for address in addresses]
        manifests = _manifests(links, name, deadline, wait_s)
        faults.site("transfer.describe")
        source = joint(manifests, [link.peer for link in links])
        self.template = Template(
            into, source.arrays, source.scalars, selection, rank=rank, world=world, source="publication"
        )
        for one in self.template.wanted:
            leaf = self.template.flat.leaves[one.at]
            if isinstance(leaf, Shard):  # compared as the whole array; wanted is the slice
                one.sink = ShardSink(leaf, rank)
        self.rebuild = self.template.flat.rebuild if into is not None else _rebuilding(self.template)
        self.boxes: dict[str, list[tuple[int, int, int]]] = {}
        found, size = self._routed(links, manifests, source, rank)
        self.ties = [
            Tie(host, address, name, route, manifest)
            for address, route, manifest in zip(addresses, found, manifests, strict=True)
        ]
        self.batches = self._batched()
        self.borrows = any(one is not None for one in landings(self.batches))
        """Whether to read peers' memory, where they lend it, rather than have it written into ours."""
        self.nbytes = sum(route.nbytes for route in found)
        self.num_segments = sum(len(route.route.segments) for route in found)
        text = "\n".join([name, *(f"{one.peer} {one.route.digest}" for one in found)])
        self.digest = xxhash.xxh3_128_hexdigest(text.encode())
        self.buffers = BufferSets(size, pin=self._pin)
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._current: tuple[int, Any] | None = None
        self._running: set[Drive] = set()
        self._closed = False
        for tie, link in zip(self.ties, links, strict=True):
            tie.prepare(link, deadline)
        faults.site("transfer.prepare")

    def _routed(
        self, links: Sequence[PeerLink], manifests: Sequence[Manifest], source: Joint, rank: int
    ) -> tuple[list[PeerRoute], int]:
        """The route from each peer, and how large a buffer is."""
        wanted = [one for one in self.template.wanted if one.sink is not None]
        target = Layout((one.name, one.layout()) for one in wanted)
        places: dict[tuple[str, int], int] = {}
        for one in wanted:
            assert one.sink is not None
            for box, ordinal in enumerate(one.sink.description.local):
                if ordinal >= 0:
                    places[one.name, box] = len(places)
        found = routes(
            source,
            manifests,
            target,
            {one.name: one.stored for one in wanted},
            places,
            rank=rank,
            chunk_bytes=self.host.settings.chunk_bytes,
        )
        for link, route in zip(links, found, strict=True):
            if route.stream.num_chunks > MAX_CHUNKS:
                raise TransferError(
                    f"{link.peer}: {route.stream.nbytes:,} bytes in chunks of {route.stream.chunk_bytes:,}; "
                    f"{MAX_CHUNKS:,} chunks are allowed",
                    hint="give the endpoint a larger chunk_bytes",
                )
        keys = list(places)
        # In the order in which the bytes come, so that neighbours in a stream are neighbours in memory.
        ordered = dict.fromkeys(place for route in found for place in route.stream.places())
        ordered.update(dict.fromkeys(range(len(keys))))
        offsets: dict[int, int] = {}
        size = 0
        for place in ordered:
            name, box = keys[place]
            nbytes = target[name].box_nbytes(box)
            offsets[place] = size
            self.boxes.setdefault(name, []).append((box, size, size + nbytes))
            size += aligned(nbytes)
        names = {place: name for (name, _), place in places.items()}
        made = [PeerRoute(link.peer, one, offsets, names) for link, one in zip(links, found, strict=True)]
        return made, size

    def _batched(self) -> list[Batch]:
        """The arrays by the framework that makes them: sorted once, not at every run."""
        batches: dict[int, Batch] = {}
        for one in self.template.wanted:
            if one.sink is not None:
                adapter = None if isinstance(one.sink, ShardSink) else one.adapter
                _, at, sinks = batches.setdefault(id(adapter), (adapter, [], []))
                at.append(one.at)
                sinks.append((one.sink, self.boxes.get(one.name, []), one.cast_from))
        return list(batches.values())

    def _pin(self, memory: Bytes1D) -> Iterator[Callable[[], None]]:
        """Pin a buffer for those frameworks whose arrays go on to devices."""
        for adapter, _, sinks in self.batches:
            undo = None if adapter is None else adapter.pin(memory, [sink for sink, _, _ in sinks])
            if undo is not None:
                yield undo

    # ---- running

    def run(self, version: int | None = None, deadline_s: float = 60.0, checked: bool = True) -> Transfer:
        """Begin a transfer; returns at once.

        `version` None takes the newest that all peers have; a number waits for it to be published. At
        `deadline_s` the run fails, whatever it waits for. `checked` False trusts the transport.
        """
        if version is not None and version < 0:
            raise UsageError(f"version={version}; versions start at 0", hint="None takes the newest")
        transfer = Transfer(tuple(str(tie.address) for tie in self.ties))
        drive = Drive(self, transfer, version, Patience(deadline_s), checked)
        with self._lock:
            if self._closed:
                raise UsageError("the plan is closed")
            self._running.add(drive)
        if not self.host.workers.submit(drive):
            self.ended(drive)
            transfer.finish(None, TransferError("the endpoint is closed"))()
        return transfer

    def ended(self, drive: Drive) -> None:
        self._running.discard(drive)

    @property
    def current(self) -> tuple[int, Any] | None:
        """The newest version that was committed, and its tree; None before the first."""
        return self._current

    def commit(self, version: int, tree: Any) -> None:
        """Swap the new version in, at once."""
        with self._lock:
            if not self._closed and (self._current is None or self._current[0] <= version):
                self._current = (version, tree)

    def connect(self, deadline: Patience) -> int:
        """Make sure that every peer knows the plan; how many connections that took."""
        with self._connecting:
            return sum(tie.connect(deadline) for tie in self.ties)

    def common_version(self, deadline: Patience) -> int:
        """The version to ask all peers for."""
        if len(self.ties) == 1:
            return NEWEST
        return common([tie.open_link() for tie in self.ties], self.name, deadline)

    def changes(self, version: int | None, deadline: Patience) -> list[str]:
        """What the peers publish now that is not what the plan was made for."""
        found: list[str] = []
        for tie in self.ties:
            if tie.link is not None and not tie.link.lost:
                found += tie.changes(NEWEST if version is None else version, deadline)
        return list(dict.fromkeys(found))

    def unready(self, buffer: int) -> None:
        """Tell the peers that a buffer was given up."""
        for tie in self.ties:
            tie.unready(buffer)

    def explain(self) -> str:
        """The plan in words."""
        peers = f"{len(self.ties)} peer{'s' if len(self.ties) != 1 else ''}"
        size = f"{self.nbytes:,} bytes in {self.num_segments:,} slices"
        lines = [f"{self.name!r}: {size} from {peers}, plan {self.digest[:12]}"]
        for tie in self.ties:
            stream = tie.route.stream
            by = tie.link.mover.name if tie.link is not None and not tie.link.lost else "not connected"
            strided = sum(bool(one.dims) for one in tie.route.route.segments)
            num = len(tie.route.route.segments)
            lines.append(
                f"  {tie.address} ({by}): {stream.nbytes:,} bytes in {num:,} slices ({strided:,} strided), "
                f"{stream.num_chunks:,} chunks of {stream.chunk_bytes:,}"
            )
        casts = [f"{one.name} from {one.cast_from}" for one in self.template.wanted if one.cast_from]
        if casts:
            lines.append(f"  cast here: {', '.join(casts)}")
        return "\n".join(lines)

    def close(self) -> None:
        """Cancel what is under way and give the buffers up; trees that were handed out stay valid."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            running = list(self._running)
            self._current = None
        for drive in running:
            drive.cancel()
        for tie in self.ties:
            tie.forget()
        self.buffers.close()
        self.host.forget_plan(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _rebuilding(template: Template) -> Callable[[list[Any]], Any]:
    """Puts a tree of named leaves together; the names are taken apart once, not at every run."""
    pairs, rebuild = flatten(template.flat.rebuild(list(range(len(template.flat.leaves)))))
    order = [at for _, at in pairs]
    return lambda leaves: rebuild([leaves[at] for at in order])


def _manifests(links: Sequence[PeerLink], name: str, deadline: Patience, wait_s: float) -> list[Manifest]:
    """What each peer has of one version, the same of all."""
    version = NEWEST if len(links) == 1 else common(links, name, deadline, wait_s)
    found = [described(link, name, deadline, version=version, wait_s=wait_s) for link in links]
    if deadline.expired():
        raise StalledError(f"{', '.join(link.peer for link in links)}: no description in time")
    return [one.manifest for one in found]
