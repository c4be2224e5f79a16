"""Holdfast's side: an endpoint that publishes, and one with a prepared plan that it runs again and again."""

from __future__ import annotations

import time
from typing import Any, final

from bench.transfer import trees
from bench.transfer.sides import DEADLINE_S
from bench.transfer.trees import TreeSpec
from holdfast.transfer import Endpoint

_NAME = "tree"


@final
class OurSource:
    """Publishes the same memory again and again, as one version after the other."""

    def __init__(self, spec: TreeSpec, options: dict[str, Any]) -> None:
        self._tree = trees.cut(trees.filled(spec), spec)
        self.digest = trees.digest(self._tree)
        self._endpoint = Endpoint(**options["endpoint"])
        self._publication: Any = self._endpoint.publish(_NAME, self._tree, version=0)
        self.address = self._endpoint.address

    def offer(self, number: int) -> None:
        older, self._publication = self._publication, self._endpoint.publish(_NAME, self._tree, number)
        older.release()

    def close(self) -> None:
        self._endpoint.close()


@final
class OurTarget:
    """Runs its plan. The tree of the run before is dropped first, as one does who takes a new version."""

    def __init__(self, spec: TreeSpec, address: str, options: dict[str, Any]) -> None:
        self._transport = options["transport"]
        self._endpoint = Endpoint(**options["endpoint"])
        self._plan = self._endpoint.prepare(address, _NAME)
        self._tree: dict[str, Any] = {}

    def take(self, number: int, checked: bool) -> float:
        self._tree = {}
        started = time.perf_counter()
        result = self._plan.run(number, deadline_s=DEADLINE_S, checked=checked).result()
        took = time.perf_counter() - started
        if set(result.transports.values()) != {self._transport}:
            raise RuntimeError(f"went by {result.transports}, not by {self._transport}")
        self._tree = result.tree
        return took

    def again(self, times: int) -> list[float]:
        """The times of that many runs of the same version."""
        found = []
        for _ in range(times):
            self._tree = {}
            started = time.perf_counter()
            result = self._plan.run(deadline_s=DEADLINE_S).result()
            found.append(time.perf_counter() - started)
            self._tree = result.tree
        return found

    def digest(self) -> str:
        return trees.digest(self._tree)

    def close(self) -> None:
        self._plan.close()
        self._endpoint.close()
