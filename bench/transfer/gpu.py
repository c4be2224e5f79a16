"""A tree from the GPU of one process to the GPU of another: `python -m bench.transfer.gpu [GIB]`.

The source is a process of its own, as a trainer beside a rollout engine is; both use the first GPU. Each
version has other values; the last one that arrived is compared with what the source published. Prints one
JSON object: seconds and GB/s, the first run apart, then medians of five.
"""

from __future__ import annotations

import json
import math
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from bench import machine
from holdfast.transfer import Endpoint

_ARRAYS = 64
_RUNS = 5
_DEADLINE_S = 120.0
_NAME = "weights"


def _shape(nbytes: int) -> tuple[int, int]:
    """Of each array."""
    return max(1, nbytes // _ARRAYS // 4096), 1024


def _weights(nbytes: int, version: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(version), _ARRAYS)
    made = {f"w{at:02d}": jax.random.normal(key, _shape(nbytes), jnp.float32) for at, key in enumerate(keys)}
    return jax.block_until_ready(made)  # type: ignore[no-untyped-call, no-any-return]


def _wanted(nbytes: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The template of the target: the same arrays on the first device."""
    placed = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    one = jax.ShapeDtypeStruct(_shape(nbytes), jnp.float32, sharding=placed)  # type: ignore[no-untyped-call]
    return {f"w{at:02d}": one for at in range(_ARRAYS)}


def _digest(tree: dict[str, jax.Array]) -> str:
    total = xxhash.xxh3_128()
    for name in sorted(tree):
        total.update(np.asarray(tree[name]).tobytes())
    return total.hexdigest()


class Source:
    """Publishes one version after the other, and says how long that took."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._endpoint = Endpoint()
        self._publication: Any = None
        self.address = self._endpoint.address

    def publish(self, version: int) -> dict[str, Any]:
        tree = _weights(self._nbytes, version)
        older = self._publication
        started = time.perf_counter()
        self._publication = self._endpoint.publish(_NAME, tree, version)
        seconds = time.perf_counter() - started
        if older is not None:
            older.release()
        # Reading it back by `np.asarray` takes longer than all else: the last version is enough.
        return {"publish_s": seconds, "digest": _digest(tree) if version == _RUNS else ""}

    def close(self) -> None:
        self._endpoint.close()


class Elsewhere:
    """A source in a process of its own."""

    def __init__(self, nbytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.transfer.gpu", "source", str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in: IO[str] = self._process.stdin
        self._out: IO[str] = self._process.stdout
        self.address: str = self._answer()["address"]

    def _answer(self) -> dict[str, Any]:
        there, _, _ = select.select([self._out], [], [], _DEADLINE_S)
        line = self._out.readline() if there else ""
        if not there:
            self._process.kill()
        if not line:
            raise SystemExit(f"the source ended with exit code {self._process.wait(_DEADLINE_S)}")
        found: dict[str, Any] = json.loads(line)
        return found

    def publish(self, version: int) -> dict[str, Any]:
        print(version, file=self._in, flush=True)
        return self._answer()

    def close(self) -> None:
        self._in.close()  # it ends with its input
        self._process.wait(_DEADLINE_S)


def serve(nbytes: int) -> None:
    """The other process: a version for each line of input."""
    source = Source(nbytes)
    print(json.dumps({"address": source.address}), flush=True)
    for line in sys.stdin:
        print(json.dumps(source.publish(int(line))), flush=True)
    source.close()


@contextmanager
def _source(transport: str, nbytes: int) -> Iterator[Source | Elsewhere]:
    source = Source(nbytes) if transport == "process" else Elsewhere(nbytes)
    try:
        yield source
    finally:
        source.close()


def measured(transport: str, nbytes: int, *, checked: bool) -> dict[str, Any]:
    """Versions published and pulled by one transport."""
    into = _wanted(nbytes)
    published, took = [], []
    with _source(transport, nbytes) as source, Endpoint(transports=[transport]) as target:
        plan = None
        for version in range(_RUNS + 1):
            told = source.publish(version)
            plan = plan or target.prepare(source.address, _NAME, into=into)
            started = time.perf_counter()
            result = plan.run(version, deadline_s=_DEADLINE_S, checked=checked).result()
            jax.block_until_ready(result.tree)  # type: ignore[no-untyped-call]
            took.append(time.perf_counter() - started)
            published.append(told["publish_s"])
            if set(result.transports.values()) != {transport}:
                raise SystemExit(f"went by {result.transports}, not by {transport}")
            if version == _RUNS and _digest(result.tree) != told["digest"]:
                raise SystemExit(f"{transport}: other bits arrived than were published")
            del result
    total = 4 * _ARRAYS * math.prod(_shape(nbytes))

    def row(first: float, rest: list[float]) -> dict[str, float]:
        median = statistics.median(rest)
        return {"first_s": first, "median_s": median, "gb_per_s": total / median / 1e9}

    return {"publish": row(published[0], published[1:]), "run": row(took[0], took[1:]), "nbytes": total}


def by_hand(nbytes: int) -> dict[str, float]:
    """The same bytes to the host by `np.asarray` and back by `device_put`, in one process."""
    down, up = [], []
    for version in range(_RUNS):
        tree = _weights(nbytes, version)
        started = time.perf_counter()
        host = {name: np.asarray(one) for name, one in tree.items()}
        middle = time.perf_counter()
        jax.block_until_ready(jax.device_put(host, jax.devices()[0]))  # type: ignore[no-untyped-call]
        down.append(middle - started)
        up.append(time.perf_counter() - middle)
    total = 4 * _ARRAYS * math.prod(_shape(nbytes))
    return {
        "np.asarray GB/s": total / statistics.median(down) / 1e9,
        "device_put GB/s": total / statistics.median(up) / 1e9,
    }


def main() -> None:
    """Measure every transport, checked and not, and the way by hand."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # two processes share the GPU
    if sys.argv[1:2] == ["source"]:
        serve(int(sys.argv[2]))
        return
    nbytes = int(float(sys.argv[1] if len(sys.argv) > 1 else "2") * 2**30)
    found: dict[str, Any] = {"device": jax.devices()[0].device_kind, "by hand": by_hand(nbytes)}
    for transport in ("process", "memfd", "tcp"):
        for checked in (True, False):
            name = transport if checked else f"{transport}, unchecked"
            found[name] = measured(transport, nbytes, checked=checked)
            print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    found["versions"] = machine.versions("holdfast", "jax", "jaxlib", "numpy")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
