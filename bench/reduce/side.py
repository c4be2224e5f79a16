"""One process of a team: `python -m bench.reduce.side holdfast|gloo OPTIONS`.

It obeys orders on standard input, one JSON object a line, and answers each with another.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, final

import numpy as np

DEADLINE_S = 300.0


@final
class OurSide:
    """A member of a group of reducers."""

    def __init__(self, about: dict[str, Any]) -> None:
        from holdfast.reduce import Reducer

        self._rank, self._size = about["rank"], about["size"]
        self._array = np.full(about["floats"], 1.0 + self._rank, np.float32)
        self._reducer = Reducer(num_lanes=self._size, transports=about["transports"])
        self._step = -1

    def first(self) -> Any:
        return [self._rank, self._reducer.incarnation, self._reducer.address]

    def meet(self, members: list[Any]) -> None:
        from holdfast.reduce import Group, Member

        self._reducer.regroup(Group(1, self._rank, tuple(Member(*member) for member in members)))

    def go(self, times: int) -> list[tuple[float, float]]:
        """Seconds of each sum, and of its exchange."""
        lanes = {rank: [rank] for rank in range(self._size)}
        found = []
        for _ in range(times):
            self._step += 1
            started = time.perf_counter()
            self._reducer.begin(self._step, lanes)
            self._reducer.add(self._rank, self._array)
            added = time.perf_counter()
            self._reducer.exchange(DEADLINE_S, lambda: None)
            self._total = self._reducer.total()
            done = time.perf_counter()
            found.append((done - started, done - added))
        return found

    def values(self) -> list[float]:
        return [float(self._total[0]), float(self._total[-1]), float(self._total[len(self._total) // 3])]


@final
class GlooSide:
    """A process of a JAX world."""

    def __init__(self, about: dict[str, Any]) -> None:
        import jax

        self._jax = jax
        jax.config.update("jax_cpu_collectives_implementation", "gloo")  # type: ignore[no-untyped-call]
        jax.distributed.initialize(f"127.0.0.1:{about['port']}", about["size"], about["rank"])
        mesh = jax.make_mesh((about["size"],), ("replica",))
        untyped: Any = jax
        spec = untyped.sharding.PartitionSpec
        sharding = untyped.sharding.NamedSharding(mesh, spec("replica"))
        mine = np.full((1, about["floats"]), 1.0 + about["rank"], np.float32)
        self._array = untyped.make_array_from_process_local_data(sharding, mine)
        self._sum = untyped.jit(
            untyped.shard_map(
                lambda x: untyped.lax.psum(x[0], "replica"),
                mesh=mesh,
                in_specs=spec("replica"),
                out_specs=spec(),
            )
        )

    def first(self) -> Any:
        return None

    def meet(self, members: list[Any]) -> None:
        pass

    def go(self, times: int) -> list[tuple[float, float]]:
        found = []
        for _ in range(times):
            started = time.perf_counter()
            self._total = self._sum(self._array)
            self._total.block_until_ready()
            took = time.perf_counter() - started
            found.append((took, took))
        return found

    def values(self) -> list[float]:
        local = np.asarray(self._total.addressable_data(0))
        return [float(local[0]), float(local[-1]), float(local[len(local) // 3])]


def main() -> None:
    """Obey until the input ends."""
    kind, about = sys.argv[1], json.loads(sys.argv[2])
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a peer prints must not end up among the answers
    side = OurSide(about) if kind == "holdfast" else GlooSide(about)
    print(json.dumps(side.first()), file=out, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        said = getattr(side, order.pop("do"))(**order)
        print(json.dumps(said), file=out, flush=True)
    os._exit(0)  # jaxlib may wait, or abort, when the others are gone


if __name__ == "__main__":
    main()
