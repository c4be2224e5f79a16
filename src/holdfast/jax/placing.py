"""Host arrays put on devices, many in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from holdfast.arrays import Placement


class Made(NamedTuple):
    """An array, of one device or of several that have the same, and the host array that it is made from."""

    host: Any
    shard: Any


def put(batch: Sequence[Placement], made: list[Made], *, kept: bool) -> list[Any]:
    """The arrays of a batch. `kept` says that the host memory stays the caller's once they are ready.

    What is on its way to devices is added to `made` as it is sent, also if a later part of the batch fails.
    """
    chosen: dict[tuple[bool, bool], list[tuple[int, Any, Any]]] = {}
    arrays: dict[int, Any] = {}
    for at, placement in enumerate(batch):
        if not kept and placement.sink.at_home:
            arrays[at] = placement.sink.made(placement.boxes, alias=placement.alias)
            continue
        kind = (kept or placement.alias, placement.sink.committed)
        for host, where in placement.sink.hosts(placement.boxes):
            chosen.setdefault(kind, []).append((at, host, where))
    shards: dict[int, list[Any]] = {}
    # One call for many arrays: a device_put of its own costs each of them three times as much.
    for (alias, committed), hosts in chosen.items():
        data = [foreign(host, where) if kept else host for _, host, where in hosts]
        if committed:
            sent = jax.device_put(data, [where for _, _, where in hosts], may_alias=alias)
        else:
            # Nowhere in particular means the default device, which the program may have set to another one.
            with jax.default_device(hosts[0][2]):
                sent = jax.device_put(data, may_alias=alias)
        for (at, host, _), shard in zip(hosts, sent, strict=True):
            made.append(Made(host, shard))
            shards.setdefault(at, []).append(shard)
    for at, some in shards.items():
        arrays[at] = batch[at].sink.assembled(some)
    return [arrays[at] for at in range(len(batch))]


def foreign(host: Any, where: Any) -> Any:
    """What a device, or those of a sharding, may be given for good.

    A CPU device goes on reading host memory that is well aligned, also with may_alias=False (JAX 0.10 does
    not look at that for numpy arrays). Others have copied it when their array is ready.
    """
    device = next(iter(where.device_set)) if isinstance(where, jax.sharding.Sharding) else where
    return host.copy() if device.platform == "cpu" else host
