"""The measurements: two subjects back to back, again and again; the ratio is taken pair by pair."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from bench.report import Series
from bench.transfer import plain
from bench.transfer.moving import Moving, Subject
from bench.transfer.trees import TreeSpec

Progress = Callable[[str], None]
_MIB = 1 << 20

TCP = Subject("holdfast", {"transport": "tcp", "endpoint": {"transports": ["tcp"]}})
LOCAL = Subject("holdfast", {"transport": "memfd", "endpoint": {}})

JAX_BEST = Subject("jax", {"best": True})
JAX_DEFAULT = Subject("jax", {"best": False})
PEERS = {
    "vs_jax_best": ("jax", "jax, at its best", JAX_BEST, "tcp"),
    "vs_jax_default": ("jax", "jax, as it comes", JAX_DEFAULT, "tcp"),
    "vs_ray": ("ray", "ray put and get", Subject("ray"), "memfd"),
    "vs_gloo": ("torch", "gloo", Subject("gloo"), "tcp"),
}
"""For each key: the package that it needs, its name in the tables, who moves, and which of our transports is
like its own. None of them has checksums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much to measure."""

    sizes: tuple[int, ...] = (256 * _MIB, 2048 * _MIB)
    num_arrays: int = 1000
    segments: tuple[int, ...] = (1, 100, 1000)
    """Of the runs of tiny arrays."""
    reruns: int = 200
    peer_trees: int | None = None
    """How many of the trees to measure beside peers; None: all."""

    def trees(self) -> list[TreeSpec]:
        """Every size as one array and as many."""
        return [TreeSpec(size, number) for size in self.sizes for number in (1, self.num_arrays)]


SMOKE = Plan(sizes=(_MIB,), num_arrays=10, segments=(10,), reruns=3, peer_trees=1)


class Arm(NamedTuple):
    """One side of a pair: a name for the tables, and whether with checksums (where there is a choice)."""

    moving: Moving
    name: str
    tree: TreeSpec
    checked: bool = True


@final
class Rounds:
    """All measurements."""

    def __init__(self, plan: Plan, peers: Sequence[str], rounds: int, progress: Progress) -> None:
        self._plan, self._peers, self._rounds, self._progress = plan, peers, rounds, progress
        self._seconds: dict[tuple[str, TreeSpec], list[float]] = defaultdict(list)
        self._ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._reruns: dict[str, list[float]] = {}
        self._beyond: list[float] = []
        self._way = plain.WAYS[0]
        self.failures: list[str] = []

    def run(self) -> None:
        """Measure everything. A peer that fails is noted; Holdfast must not."""
        self._choose_way()
        for tree in self._plan.trees():
            self._against_raw(tree)
            self._against_memcpy(tree)
        for size in self._plan.sizes:
            self._many_against_one(size)
        for key, (package, name, subject, like) in PEERS.items():
            for tree in self._plan.trees()[: self._plan.peer_trees] if package in self._peers else ():
                try:
                    self._against_peer(key, name, subject, like, tree)
                except RuntimeError as error:
                    self.failures.append(f"{name}, {tree.title}: {error}")
        self._tiny()

    # ---- what comes out

    def value(self, key: str) -> float | None:
        """The median of a key's ratios for the tree for which it is worst."""
        found = [statistics.median(ratios) for ratios in self._ratios.get(key, {}).values()]
        return min(found, default=None)

    def rerun_overhead_us(self) -> float:
        """The worst over transports and numbers of segments, without 5 µs for each segment."""
        return max(self._beyond)

    def raw(self) -> dict[str, Series]:
        """The ratios pair by pair, and the times behind them."""
        series = {
            f"{key}, {title}": Series(tuple(ratios), unit="×")
            for key, cells in self._ratios.items()
            for title, ratios in cells.items()
        }
        for (name, tree), seconds in self._seconds.items():
            series[f"{name}, {tree.title}"] = Series(tuple(seconds), nbytes=tree.nbytes)
        for name, micros in self._reruns.items():
            series[name] = Series(tuple(micros), unit="µs")
        return series

    def way(self) -> str:
        """How the plain sockets were driven, in words."""
        way = self._way
        each = f"{way['chunk'] // _MIB} MiB" if way["chunk"] else "everything"
        buffers = f"buffers of {way['buffer'] // _MIB} MiB" if way["buffer"] else "the kernel's buffers"
        return f"{way['streams']} connections, {each} per call, {buffers}"

    # ---- how it is measured

    def _pairs(self, other: Arm, ours: Sequence[tuple[str, Arm]], by: str = "") -> None:
        """Measure the other right between one or two of ours, in turns from either end; `ours` are by key."""
        for number in range(self._rounds):
            row = [arm for _, arm in ours]
            row.insert(1, other)
            if number % 2:
                row.reverse()
            took = {}
            for arm in row:
                took[arm] = arm.moving.take(checked=arm.checked)
                self._seconds[arm.name, arm.tree].append(took[arm])
            for key, arm in ours:
                self._ratios[key][by + arm.tree.title].append(took[other] / took[arm])

    def _choose_way(self) -> None:
        """Find the fastest way to drive plain sockets: what every other number is measured against."""
        self._progress("plain sockets: which way is fastest here")
        tree = TreeSpec(self._plan.sizes[0], 1)
        tries = min(self._rounds, 5)
        medians = []
        for way in plain.WAYS if self._rounds > 1 else plain.WAYS[:1]:
            with Moving(Subject("raw tcp", way), tree) as moving:
                medians.append((statistics.median(moving.take() for _ in range(tries)), way))
        self._way = min(medians, key=lambda found: found[0])[1]

    def _against_raw(self, tree: TreeSpec) -> None:
        self._progress(f"TCP, {tree.title}")
        with Moving(TCP, tree) as ours, Moving(Subject("raw tcp", self._way), tree) as raw:
            self._pairs(
                Arm(raw, "plain sockets", tree),
                [
                    ("tcp_vs_raw", Arm(ours, "holdfast tcp, unchecked", tree, False)),
                    ("tcp_checked_vs_raw", Arm(ours, "holdfast tcp", tree)),
                ],
            )

    def _against_memcpy(self, tree: TreeSpec) -> None:
        self._progress(f"same node, {tree.title}")
        with Moving(LOCAL, tree) as ours, Moving(Subject("memcpy"), tree) as copy:
            self._pairs(
                Arm(copy, "one copy by one thread", tree),
                [
                    ("local_vs_memcpy", Arm(ours, "holdfast memfd, unchecked", tree, False)),
                    ("local_checked_vs_memcpy", Arm(ours, "holdfast memfd", tree)),
                ],
            )

    def _many_against_one(self, size: int) -> None:
        many, one = TreeSpec(size, self._plan.num_arrays), TreeSpec(size, 1)
        for way, name in ((TCP, "tcp"), (LOCAL, "memfd")):
            self._progress(f"{name}, {many.title} and in one")
            with Moving(way, many) as ours, Moving(way, one) as other:
                mine = Arm(ours, f"holdfast {name}", many)
                self._pairs(Arm(other, f"holdfast {name}", one), [("many_vs_one", mine)], by=f"{name}, ")

    def _against_peer(self, key: str, name: str, subject: Subject, like: str, tree: TreeSpec) -> None:
        self._progress(f"{name}, {tree.title}")
        with (
            Moving(subject, tree) as peer,
            Moving(LOCAL, tree) as ours,
            Moving(TCP if like == "tcp" else LOCAL, tree) as bare,
        ):
            self._pairs(
                Arm(peer, name, tree),
                [
                    (key, Arm(ours, "holdfast memfd", tree)),
                    (f"{key}, {like} unchecked", Arm(bare, f"holdfast {like}, unchecked", tree, False)),
                ],
            )

    def _tiny(self) -> None:
        self._progress("runs of tiny arrays")
        for way, name in ((TCP, "tcp"), (LOCAL, "memfd")):
            for number in self._plan.segments:
                with Moving(way, TreeSpec(64 * number, number)) as ours:
                    ours.again(max(1, self._plan.reruns // 10))
                    micros = [1e6 * seconds for seconds in ours.again(self._plan.reruns)]
                self._reruns[f"holdfast {name}, run of {number:,} tiny arrays"] = micros
                self._beyond.append(statistics.median(micros) - 5 * number)
