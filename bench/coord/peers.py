"""The clients of the peers: jaxlib's coordination service, torch's TCPStore, and etcd over gRPC."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from typing import Any

from bench.coord.crowds import DEADLINE_S, VALUE, LoopCrowd, ThreadCrowd

_MS = int(DEADLINE_S * 1000)


class Jaxlib(ThreadCrowd):
    """Clients of jaxlib's service, made with what `jax.distributed.initialize` passes."""

    def __init__(self, address: str, slots: Sequence[int], total: int) -> None:
        super().__init__(address, slots, total)
        from jaxlib import _jax

        self._jaxlib: Any = _jax
        self._clients: dict[int, Any] = {}

    def _enter(self, place: int) -> None:
        client = self._jaxlib.get_distributed_runtime_client(
            self._address,
            self._slots[place],
            init_timeout=int(DEADLINE_S),
            use_compression=True,
            heartbeat_timeout=100,
        )
        client.connect()
        self._clients[place] = client

    def _meet(self, place: int) -> None:
        self._clients[place].wait_at_barrier("bench", _MS)

    def _set(self, place: int) -> None:
        self._clients[place].key_value_set_bytes(f"bench/{self._slots[place]}", VALUE, allow_overwrite=True)

    def _get(self, place: int) -> None:
        self._clients[place].key_value_try_get_bytes(f"bench/{self._slots[place]}")

    def _leave(self, place: int) -> None:
        self._clients[place].shutdown()


class TcpStore(ThreadCrowd):
    """Clients of a TCPStore with the libuv backend, its default."""

    def __init__(self, address: str, slots: Sequence[int], total: int) -> None:
        super().__init__(address, slots, total)
        from torch.distributed import TCPStore

        self._new: Any = TCPStore
        self._stores: dict[int, Any] = {}
        self._met = [0] * len(slots)

    def _enter(self, place: int) -> None:
        host, _, port = self._address.rpartition(":")
        timeout = datetime.timedelta(seconds=DEADLINE_S)
        self._stores[place] = self._new(host, int(port), None, False, timeout, wait_for_workers=False)

    def _meet(self, place: int) -> None:
        # A key of its own for each time, as its documentation asks.
        self._met[place] += 1
        self._stores[place].barrier(f"bench-{self._met[place]}", self._total)

    def _set(self, place: int) -> None:
        self._stores[place].set(f"bench/{self._slots[place]}", VALUE)

    def _get(self, place: int) -> None:
        self._stores[place].get(f"bench/{self._slots[place]}")

    def _leave(self, place: int) -> None:
        del self._stores[place]


# ---- etcd: the two messages of its API that are needed, written out

_PUT, _RANGE = "/etcdserverpb.KV/Put", "/etcdserverpb.KV/Range"


def _field(number: int, value: bytes) -> bytes:
    """A bytes field of a protocol buffer; short ones only."""
    assert len(value) < 128
    return bytes((number << 3 | 2, len(value))) + value


def put_request(key: str, value: bytes) -> bytes:
    """etcdserverpb.PutRequest: key is field 1, value is field 2."""
    return _field(1, key.encode()) + _field(2, value)


def range_request(key: str) -> bytes:
    """etcdserverpb.RangeRequest for one key: key is field 1."""
    return _field(1, key.encode())


class EtcdThread(ThreadCrowd):
    """Clients of etcd on threads; answers are not decoded, which favours etcd."""

    def __init__(self, address: str, slots: Sequence[int], total: int) -> None:
        super().__init__(address, slots, total)
        import grpc

        self._grpc: Any = grpc
        self._calls: dict[int, tuple[Any, Any, Any]] = {}

    def _enter(self, place: int) -> None:
        channel = self._grpc.insecure_channel(self._address)
        self._grpc.channel_ready_future(channel).result(DEADLINE_S)
        self._calls[place] = channel, channel.unary_unary(_PUT), channel.unary_unary(_RANGE)

    def _meet(self, place: int) -> None:
        raise NotImplementedError("etcd has no barrier")

    def _set(self, place: int) -> None:
        self._calls[place][1](put_request(f"bench/{self._slots[place]}", VALUE), timeout=DEADLINE_S)

    def _get(self, place: int) -> None:
        self._calls[place][2](range_request(f"bench/{self._slots[place]}"), timeout=DEADLINE_S)

    def _leave(self, place: int) -> None:
        self._calls[place][0].close()


class EtcdLoop(LoopCrowd):
    """Clients of etcd as tasks over one gRPC channel, which carries many calls at once.

    More channels were measured: no faster. Threads: half as fast.
    """

    def __init__(self, address: str, slots: Sequence[int], total: int) -> None:
        super().__init__(address, slots, total)
        import grpc

        self._grpc: Any = grpc
        self._channel: Any = None
        self._put: Any = None
        self._range: Any = None

    async def _enter(self, place: int) -> None:
        if place == 0:
            self._channel = self._grpc.aio.insecure_channel(self._address)
            self._put, self._range = self._channel.unary_unary(_PUT), self._channel.unary_unary(_RANGE)
            await self._channel.channel_ready()

    async def _meet(self, place: int) -> None:
        raise NotImplementedError("etcd has no barrier")

    async def _set(self, place: int) -> None:
        await self._put(put_request(f"bench/{self._slots[place]}", VALUE), timeout=DEADLINE_S)

    async def _get(self, place: int) -> None:
        await self._range(range_request(f"bench/{self._slots[place]}"), timeout=DEADLINE_S)

    async def _leave(self, place: int) -> None:
        if place == 0:
            await self._channel.close()


def serve_jaxlib(address: str, total: int) -> Any:
    """A service of jaxlib's for `total` clients; keep what is returned."""
    from jaxlib import _jax

    return _jax.get_distributed_runtime_service(
        address, total, heartbeat_timeout=100, shutdown_timeout=300, recoverable=False
    )


def serve_tcpstore(address: str, _total: int) -> Any:
    """The server side of a TCPStore; keep what is returned."""
    from torch.distributed import TCPStore

    host, _, port = address.rpartition(":")
    timeout = datetime.timedelta(seconds=DEADLINE_S)
    return TCPStore(host, int(port), None, True, timeout, wait_for_workers=False)


def await_etcd(address: str) -> None:
    """Return when etcd answers a put. Fails: TimeoutError."""
    import grpc

    deadline = time.monotonic() + DEADLINE_S
    with grpc.insecure_channel(address) as channel:
        while True:
            try:
                channel.unary_unary(_PUT)(put_request("ready", b""), timeout=1.0)
                return
            except grpc.RpcError:
                if time.monotonic() > deadline:
                    raise TimeoutError("etcd did not answer") from None
