"""The peers: JAX's transfer server, Ray's object store and torch's gloo.

Each is imported where it is used, in a process of its own. JAX is used untyped: parts of it are.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from datetime import timedelta
from importlib import import_module
from secrets import token_hex
from threading import Thread
from typing import Any, final

import numpy as np

from bench.transfer import trees
from bench.transfer.sides import DEADLINE_S
from bench.transfer.trees import TreeSpec

_MIB = 1 << 20

JAX_BEST = {
    "transport_addresses": ["127.0.0.1:0"] * 4,
    "transfer_size": 32 * _MIB,
    "use_raw_buffers": True,
}
"""The fastest of what was tried, with `_pull_into_flat`: it receives into arrays that are there already."""
JAX_DEFAULT = {"transport_addresses": ["127.0.0.1:0"]}
"""As it comes. Without an address for the data a pull from another process never ends."""


def _jax_server(options: dict[str, Any]) -> Any:
    jax, transfer = import_module("jax"), import_module("jax.experimental.transfer")
    client = jax.local_devices()[0].client
    how = JAX_BEST if options["best"] else JAX_DEFAULT
    return transfer.start_transfer_server(client, "127.0.0.1:0", **how)


@final
class JaxSource:
    """An offer serves one pull."""

    def __init__(self, spec: TreeSpec, options: dict[str, Any]) -> None:
        jax = import_module("jax")
        tree = trees.cut(trees.filled(spec), spec)
        self.digest = trees.digest(tree)
        self._arrays = jax.block_until_ready([jax.device_put(array) for array in tree.values()])
        self._server = _jax_server(options)
        self.address = self._server.address()

    def offer(self, number: int) -> None:
        self._server.await_pull(number, self._arrays)

    def close(self) -> None:
        pass


@final
class JaxTarget:
    """Pulls; `best`: into arrays that are there already."""

    def __init__(self, spec: TreeSpec, address: str, options: dict[str, Any]) -> None:
        self._jax = jax = import_module("jax")
        self._best = options["best"]
        self._server = _jax_server(options)
        self._connection = self._server.connect(address)
        sizes = spec.sizes()
        if self._best:
            self._arrays = [jax.device_put(lines) for lines in map(_floats, sizes)]
            jax.block_until_ready(self._arrays)
            self._slices = [slice(0, size) for size in sizes]
        else:
            here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            self._wanted = [jax.ShapeDtypeStruct((size // 4,), np.float32, sharding=here) for size in sizes]

    def take(self, number: int, checked: bool) -> float:
        started = time.perf_counter()
        if self._best:
            for token in self._connection._pull_into_flat(number, self._arrays, self._slices):
                token.block_until_ready()
        else:
            self._arrays = []  # or the old ones would double the memory
            self._arrays = self._jax.block_until_ready(self._connection.pull(number, self._wanted))
        return time.perf_counter() - started

    def digest(self) -> str:
        return trees.digest({f"w{at:04}": np.asarray(one) for at, one in enumerate(self._arrays)})

    def close(self) -> None:
        pass


def _floats(nbytes: int) -> Any:
    return trees.lines(nbytes).view(np.float32)


@final
class RayTarget:
    """A driver that gets what an actor puts. Putting is what moves the bytes, so both are measured."""

    def __init__(self, spec: TreeSpec, _address: None, _options: dict[str, Any]) -> None:
        # A token of its own, or Ray leaves one in the home folder.
        given = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token_hex(32)}
        os.environ.update(given)
        import ray

        self._ray = ray
        self._folder = tempfile.mkdtemp(prefix="hf-ray-")  # short: Ray puts sockets into it
        ray.init(
            num_cpus=2,
            _node_ip_address="127.0.0.1",
            object_store_memory=3 * spec.nbytes + 256 * _MIB,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=self._folder,
        )
        self._actor = ray.remote(_RayActor).remote(spec.nbytes, spec.num_arrays)
        self._expected = ray.get(self._actor.digest.remote(), timeout=DEADLINE_S)
        self._tree: dict[str, Any] = {}

    def take(self, number: int, checked: bool) -> float:
        self._tree = {}  # its memory in the store is free from here on
        started = time.perf_counter()
        (ref,) = self._ray.get(self._actor.put.remote(), timeout=DEADLINE_S)
        self._tree = self._ray.get(ref, timeout=DEADLINE_S)
        return time.perf_counter() - started

    def digest(self) -> str:
        found = trees.digest(self._tree)
        if found != self._expected:
            raise RuntimeError("ray moved the wrong bytes")
        return found

    def close(self) -> None:
        self._tree = {}
        self._ray.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


class _RayActor:
    def __init__(self, nbytes: int, num_arrays: int) -> None:
        spec = TreeSpec(nbytes, num_arrays)
        self._tree = trees.cut(trees.filled(spec), spec)

    def digest(self) -> str:
        return trees.digest(self._tree)

    def put(self) -> list[Any]:
        import ray

        return [ray.put(self._tree)]


def _gloo(port: int, rank: int) -> Any:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    return dist


@final
class GlooSource:
    """Rank 0. It sends when the target says so."""

    def __init__(self, spec: TreeSpec, options: dict[str, Any]) -> None:
        import torch

        tree = trees.cut(trees.filled(spec), spec)
        self.digest = trees.digest(tree)
        self._tensors = [torch.from_numpy(array) for array in tree.values()]
        self._word = torch.zeros(1)
        self.address = self._port = options["port"]
        self._dist: Any = None

    def offer(self, number: int) -> None:
        Thread(target=self._send, daemon=True).start()

    def _send(self) -> None:
        if self._dist is None:
            self._dist = _gloo(self._port, 0)  # waits for the target
        self._dist.recv(self._word, src=1)
        for work in [self._dist.isend(tensor, dst=1) for tensor in self._tensors]:
            work.wait()

    def close(self) -> None:
        pass


@final
class GlooTarget:
    """Rank 1, with memory that was there before."""

    def __init__(self, spec: TreeSpec, port: int, _options: dict[str, Any]) -> None:
        import torch

        self._port = port
        self._tree = trees.cut(trees.lines(sum(spec.sizes())), spec)
        self._tensors = [torch.from_numpy(array) for array in self._tree.values()]
        self._word = torch.zeros(1)
        self._dist: Any = None

    def take(self, number: int, checked: bool) -> float:
        if self._dist is None:
            self._dist = _gloo(self._port, 1)
        started = time.perf_counter()
        waiting = [self._dist.irecv(tensor, src=0) for tensor in self._tensors]
        self._dist.send(self._word, dst=0)
        for work in waiting:
            work.wait()
        return time.perf_counter() - started

    def digest(self) -> str:
        return trees.digest(self._tree)

    def close(self) -> None:
        pass
