"""What the sums between replicas will cost, before anything runs. Pure: numbers in, numbers out.

    plan = sum_plan(SumSettings(gradient_bytes={"float32": 3_800_000_000}, lanes=8, replicas=8, hosts=8,
                                lane_s=0.5, link_bytes_s=12.5e9))
    print("\\n".join(plan.lines()))

The bytes are exact: those of the exchange as it is built, block sizes aside. The times are bytes over rates
that the caller gives or measured, one after the other, since nothing of a sum is hidden behind the lanes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, final

from holdfast.arrays import dtype as dtype_of
from holdfast.errors import UsageError
from holdfast.reduce.tree import roots

HOST_BYTES_S: Final = 3e9
"""What one worker hashes, copies and adds in a second. On the host of an H200 it was 2.6e9, device copies
included; on two shared cores of a small machine about as much."""
_ENOUGH: Final = 1.15
"""Nearer than this to an even division need not be."""
_MOST_LANES: Final = 64
"""More lanes per replica than this are not proposed: each has its price."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SumSettings:
    """A run, as far as its sums go. Times in seconds, rates in bytes per second. Fails: UsageError.

    `gradient_bytes` are those of one replica's result of one lane, by dtype. `hosts` hold all workers in
    order, evenly. `lane_s` is the time one lane takes; measure it in a run of one, or divide a step's time by
    the lanes of a replica. `link_bytes_s` is one host's, each way. `replace_s` is what a failure costs where
    the run is one world: new processes, restore, and the steps since the last save.
    """

    gradient_bytes: Mapping[str, int]
    lanes: int = 8
    replicas: int = 2
    workers_per_replica: int = 1
    hosts: int = 1
    lane_s: float
    link_bytes_s: float | None = None
    host_bytes_s: float = HOST_BYTES_S
    device_bytes_s: float | None = None
    """Between device and host memory; None: the results are in host memory."""
    wire_dtype: str | None = None
    replace_s: float = 60.0

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value} is less than 1"
            for name, value in (
                ("lanes", self.lanes),
                ("replicas", self.replicas),
                ("workers_per_replica", self.workers_per_replica),
                ("hosts", self.hosts),
            )
            if value < 1
        ]
        rates = {
            "lane_s": self.lane_s,
            "link_bytes_s": self.link_bytes_s,
            "host_bytes_s": self.host_bytes_s,
            "device_bytes_s": self.device_bytes_s,
            "replace_s": self.replace_s,
        }
        problems += [f"{name}={value:g} is not above 0" for name, value in rates.items() if _bad(value)]
        problems += [f"{name}: {count} bytes" for name, count in self.gradient_bytes.items() if count < 0]
        if self.replicas > self.lanes >= 1:
            problems.append(f"replicas={self.replicas} is more than lanes={self.lanes}: some would idle")
        if self.hosts > self.replicas * self.workers_per_replica >= 1:
            problems.append(f"hosts={self.hosts} is more than there are workers")
        if self.hosts > 1 and self.link_bytes_s is None:
            problems.append("link_bytes_s is not given, and there are several hosts")
        if problems:
            raise UsageError("; ".join(problems), hint="correct these settings of the sums")

    @property
    def wire_bytes(self) -> int:
        """Bytes of one sum, as it is added and sent."""
        wire = None if self.wire_dtype is None else dtype_of(self.wire_dtype)
        total = 0
        for name, count in self.gradient_bytes.items():
            own = dtype_of(name)
            narrows = wire is not None and "float" in own.name and wire.itemsize < own.itemsize
            total += count * wire.itemsize // own.itemsize if wire is not None and narrows else count
        return total


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A step with so many replicas: the most lanes that one of them has, and where the time goes."""

    replicas: int
    most_lanes: int
    compute_s: float
    exposed_s: float
    vs_ideal: float
    """Lanes of the slowest over an even division of all: 8 lanes on 7 replicas take 1.75 times the ideal."""

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SumPlan:
    """What the sums of a run cost. `advice` is for people; the rest is numbers."""

    whole: Size
    after_loss: Size | None
    """With one replica less; None where there is only one."""
    host_bytes: int
    """What the busiest host sends, or receives, in a step."""
    wire_bytes: int
    worker_bytes: int
    """Host memory of one worker, about: its lanes' sums, two totals, what it has of the others' sums."""
    break_even_s: float
    """Where failures come less often than this, one world is faster; inf if sums cost nothing."""
    advice: tuple[str, ...]

    @property
    def slowdown(self) -> float:
        """Step time after losing one replica over the time before; 1 where there is none to lose."""
        return 1.0 if self.after_loss is None else self.after_loss.step_s / self.whole.step_s

    def as_dict(self) -> dict[str, Any]:
        """All numbers, for JSON: `break_even_s` is None where it would be infinite."""
        finite = math.isfinite(self.break_even_s)
        return {
            **asdict(self),
            "slowdown": self.slowdown,
            "break_even_s": self.break_even_s if finite else None,
        }

    def lines(self) -> list[str]:
        """A table and the advice, for people."""
        rows = [("", "lanes", "compute", "exposed sum", "step", "of ideal")]
        for size in filter(None, (self.whole, self.after_loss)):
            rows.append(
                (
                    f"{size.replicas} replicas" if size.replicas > 1 else "1 replica",
                    f"{size.most_lanes}",
                    _seconds(size.compute_s),
                    _seconds(size.exposed_s),
                    _seconds(size.step_s),
                    f"{size.vs_ideal:.2f}x",
                )
            )
        widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
        table = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
        ]
        moved = (
            f"one sum: {_size(self.wire_bytes)}; through the busiest host, each way: "
            f"{_size(self.host_bytes)} a step; host memory of a worker: {_size(self.worker_bytes)}"
        )
        return [*table, moved, *self.advice]


def sum_plan(settings: SumSettings) -> SumPlan:
    """What the sums of a run cost, whole and after the loss of one replica."""
    whole = _size_of(settings, settings.replicas)
    after = _size_of(settings, settings.replicas - 1) if settings.replicas > 1 else None
    own = -(-settings.wire_bytes // settings.workers_per_replica)
    exposed_part = whole.exposed_s / whole.step_s
    break_even_s = settings.replace_s / exposed_part if exposed_part else math.inf
    return SumPlan(
        whole=whole,
        after_loss=after,
        host_bytes=_through_host(settings, settings.replicas),
        wire_bytes=settings.wire_bytes,
        # The sums of a member's lanes (one for each power of two, at most), two totals, a mirror of others'.
        worker_bytes=own * (whole.most_lanes.bit_length() + 2 + (1 if settings.hosts > 1 else 0)),
        break_even_s=break_even_s,
        advice=_advice(settings, whole, after, break_even_s),
    )


def _size_of(settings: SumSettings, replicas: int) -> Size:
    most = -(-settings.lanes // replicas)
    return Size(
        replicas=replicas,
        most_lanes=most,
        compute_s=most * settings.lane_s,
        exposed_s=_exposed_s(settings, replicas),
        vs_ideal=most * replicas / settings.lanes,
    )


def _exposed_s(settings: SumSettings, replicas: int) -> float:
    """Time of a step in which a device waits for the sum. In one world XLA sums all there is."""
    if settings.replicas == 1:
        return 0.0
    own = settings.wire_bytes / settings.workers_per_replica
    most = -(-settings.lanes // replicas)
    nodes = sum(len(one) for one in _roots(settings.lanes, replicas))
    # Each lane is hashed and folded; one share of all roots is added; the other shares are copied.
    touched = own * (most + nodes / replicas + (replicas - 1) / replicas)
    seconds = touched / settings.host_bytes_s
    if settings.device_bytes_s is not None:
        copied = sum(settings.gradient_bytes.values()) / settings.workers_per_replica
        seconds += copied * (most + 1) / settings.device_bytes_s
    if settings.link_bytes_s is not None:
        seconds += _through_host(settings, replicas) / settings.link_bytes_s
    return seconds


def _roots(lanes: int, replicas: int) -> list[tuple[object, ...]]:
    """The subtrees that each replica sends, lanes dealt out in order."""
    size, extra = divmod(lanes, replicas)
    cuts = [at * size + min(at, extra) for at in range(replicas + 1)]
    return [roots(range(cuts[at], cuts[at + 1]), lanes) for at in range(replicas)]


def _through_host(settings: SumSettings, replicas: int) -> int:
    """Bytes that the busiest host sends or receives in a step, whichever is more.

    An owner of a share asks every other for its roots of that share, and gives its sum to every other; what
    two workers of one host need from a third is sent twice.
    """
    workers = settings.workers_per_replica
    if settings.hosts == 1 or replicas == 1:
        return 0
    share = settings.wire_bytes / workers / replicas
    sent = [len(one) for one in _roots(settings.lanes, replicas)]
    seats = settings.replicas * workers

    def host(replica: int, index: int) -> int:
        return (replica * workers + index) * settings.hosts // seats

    out, into = [0.0] * settings.hosts, [0.0] * settings.hosts
    for index in range(workers):
        for giver in range(replicas):
            for taker in range(replicas):
                here, there = host(giver, index), host(taker, index)
                if here != there:
                    moved = share * (sent[giver] + 1)
                    out[here] += moved
                    into[there] += moved
    return math.ceil(max(*out, *into))


def _advice(settings: SumSettings, whole: Size, after: Size | None, break_even_s: float) -> tuple[str, ...]:
    if after is None:
        return ("one replica: nothing is summed between replicas, and a failure replaces all its processes",)
    found = []
    for size, when in ((whole, ""), (after, ", after losing one")):
        if size.vs_ideal > _ENOUGH:
            text = (
                f"{settings.lanes} lanes on {size.replicas} replicas{when}: the slowest computes "
                f"{size.most_lanes} of them, {size.vs_ideal:.2f}x the ideal time"
            )
            better = _better_lanes(settings.lanes, size.replicas)
            found.append(f"{text}; {better} smaller lanes would be nearer to it" if better else text)
    share = whole.exposed_s / whole.step_s
    found.append(
        f"sums take {share:.0%} of a step. One world, whose sums are XLA's, is faster where failures come "
        f"less often than every {_seconds(break_even_s)} (a failure there costs {settings.replace_s:g} s)"
    )
    return tuple(found)


def _better_lanes(lanes: int, replicas: int) -> int | None:
    """A multiple of the lanes that divides more evenly: each lane cut into equal parts."""
    for times in range(2, _MOST_LANES * replicas // lanes + 1):
        many = lanes * times
        if -(-many // replicas) * replicas / many <= _ENOUGH:
            return many
    return None


def _bad(value: float | None) -> bool:
    return value is not None and not (value > 0 and math.isfinite(value))


def _seconds(value: float) -> str:
    if not math.isfinite(value):
        return "never"
    for limit, scale, unit in ((1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min")):
        if value < limit:
            return f"{value * scale:.3g} {unit}"
    return f"{value / 3600:.3g} h"


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
