"""One JAX world out of the workers of a replica, with the coordination service outside of them.

A worker that dies takes nobody along: recoverability is on, and the service lives in `holdfast.jax.worlds`.
After a death nothing is repaired in place. Survivors may be stuck in a collective, hold donated or poisoned
arrays, or pin the old client through a traceback; all of that ends with their processes, which the
conductor replaces together, in the next attempt, at a new service.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np
from jax._src import cache_key, distributed, xla_bridge

from holdfast.errors import CoordError, DeadlineError, UsageError, WorldError
from holdfast.jax.hosting import World
from holdfast.jax.internals import Client, call, make_client
from holdfast.supervise.hooks import RunInfo

if TYPE_CHECKING:
    from holdfast.coord import CoordClient
    from holdfast.supervise.messages import Seat

log = logging.getLogger("holdfast.jax.world")

HOST_S: Final = 60.0
"""How long to wait for the host of worlds to answer: it may be starting."""
INIT_S: Final = 300
HEARTBEAT_S: Final = 100
LEAVE_S: Final = 10.0


def start_world(client: CoordClient, seat: Seat, workers: int, run: RunInfo) -> Callable[[], None]:
    """As `holdfast.supervise.hooks.start_world` says."""
    if xla_bridge.backends_are_initialized():
        raise UsageError(
            "JAX has devices already, and a process cannot join a world after that",
            hint="with several workers per replica, touch no device (no array, no jax.devices()) before "
            "holdfast.join() returns; `rehearse` may trace, not compile",
        )
    if distributed.global_state.client is not None:
        raise UsageError(
            "jax.distributed is initialised already",
            hint="under `holdfast launch` holdfast.join() does that; take the call out",
        )
    _configure()
    world = World(seat.replica, seat.attempt)
    address = _service(client, world, seat, workers, run)
    ours = make_client(address, seat.index, heartbeat_s=HEARTBEAT_S, init_s=INIT_S)
    # Returns when all workers of the world are connected. JAX ends the process where that fails.
    ours.connect()
    state = distributed.global_state
    state.client = ours
    state.process_id = seat.index
    state.num_processes = workers
    state.coordinator_address = address
    client.set(world.inside(seat.index), b"", owned=True)
    return lambda: _leave(client, world, seat.index, workers, run.node, ours)


def _configure() -> None:
    update: Callable[[str, Any], None] = jax.config.update
    update("jax_enable_recoverability", True)
    # Its SIGTERM handler would compete with Holdfast's own.
    update("jax_enable_preemption_service", False)
    update("jax_cpu_collectives_implementation", "gloo")
    xla_bridge.register_backend_factory("cpu", _cpu_client, priority=0, fail_quietly=False)
    if not hasattr(cache_key, "_hash_accelerator_config"):
        raise WorldError(
            f"jax {jax.__version__} computes keys of its compile cache in a way that is not known here",
            hint="use jax 0.10 or 0.11, or run with --workers-per-replica 1",
        )
    setattr(cache_key, "_hash_accelerator_config", _hash_devices)  # noqa: B010 - as a name, not as its type


def _cpu_client() -> Any:
    """The CPU backend, its collectives bound to loopback: nobody authenticates at gloo's listening socket."""
    collectives = call(
        "make_gloo_tcp_collectives",
        {"distributed_client": distributed.global_state.client, "hostname": "127.0.0.1"},
    )
    return xla_bridge.make_cpu_client(collectives)


def _service(client: CoordClient, world: World, seat: Seat, workers: int, run: RunInfo) -> str:
    """Where the service of this world is."""
    if seat.index == 0:
        client.set(world.want(run.node), b"%d" % workers)
    try:
        return client.wait(world.at, HOST_S).decode()
    except DeadlineError as error:
        raise WorldError(
            f"nobody hosts the JAX world of replica {world.replica}, attempt {world.attempt}: asked node "
            f"{run.node if seat.index == 0 else 'of worker 0'}, waited {HOST_S:g} s",
            hint="is `python -m holdfast.jax.worlds` running there? its log is beside those of the workers",
        ) from error


def _hash_devices(digest: Any, devices: np.ndarray[Any, Any]) -> None:
    """The part of the compile cache's key that says for which hardware.

    JAX takes a fingerprint of the topology, which on CPUs differs from process to process: all but the first
    would miss for ever, since only the first one writes.
    """
    for device in devices.flat:
        digest.update(f"{device.platform}/{device.device_kind};".encode())
    if any(device.platform == "cpu" for device in devices.flat):
        digest.update(cpu_features().encode())


def cpu_features() -> str:
    """A digest of what this machine's processors can do: code for another kind may not run here."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    wanted = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    text = "\n".join([platform.machine(), *wanted])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _leave(client: CoordClient, world: World, index: int, workers: int, node: int, ours: Client) -> None:
    """Leave once all have come to leave, so that nobody is cut off in the middle of a collective."""
    left = f"world/left/{world.replica}/{world.attempt}"
    ends = time.monotonic() + LEAVE_S
    try:
        if client.add(left) == workers:
            client.set(f"{left}/all", b"")
        client.wait(f"{left}/all", max(0.001, ends - time.monotonic()))
    except (CoordError, DeadlineError) as error:
        log.warning("left the world of replica %d without the others: %s", world.replica, error)
    # The backend keeps the client: it is told to go, not thrown away. With recoverability on, that waits for
    # nobody.
    distributed.global_state.client = None
    try:
        ours.shutdown()
    except Exception as error:
        log.warning("the world's client did not end well: %s", error)
    try:
        client.delete(world.inside(index))
        if index == 0:
            client.delete(world.want(node))
    except CoordError as error:
        log.warning("keys of the world stay behind: %s", error.message)
