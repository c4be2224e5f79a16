"""The measurements: every round starts every server afresh and measures every subject at every size."""

from __future__ import annotations

import shutil
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from bench.coord.crowds import moment
from bench.coord.fleet import Fleet, fleet
from bench.coord.ours import Coordinator
from bench.coord.service import service
from bench.report import Series
from bench.turns import in_turn

Progress = Callable[[str], None]

HAS_BARRIER = ("holdfast", "jaxlib", "tcpstore")
HAS_REGISTRATION = ("holdfast", "jaxlib")
"""In TCPStore and etcd a client is nobody in particular."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much to measure. Sizes are numbers of clients (0: none); `few` are processes, others share one."""

    few: int = 4
    some: int = 64
    many: int = 256
    registrations: tuple[tuple[int, int], ...] = ((1024, 3), (4096, 1))
    """Sizes at which only registration and a few barriers are measured, and in how many of the rounds."""
    barriers_few: int = 400
    barriers_many: int = 30
    exchanges: int = 20
    sets: int = 30
    repeats: int = 3
    """How often a rate is measured in a round; the median counts."""
    latencies: int = 400


SMOKE = Plan(
    few=2,
    some=0,
    many=8,
    registrations=(),
    barriers_few=5,
    barriers_many=3,
    exchanges=3,
    sets=3,
    repeats=1,
    latencies=5,
)


@final
class Rounds:
    """All measurements, by row."""

    def __init__(self, folder: Path, subjects: Sequence[str], plan: Plan, progress: Progress) -> None:
        self._folder, self._subjects, self._plan, self._progress = folder, subjects, plan, progress
        self._rows: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.failures: list[str] = []

    def run(self, rounds: int) -> None:
        """Measure everything `rounds` times. A peer that fails is noted; Holdfast must not."""
        for number in range(rounds):
            order = in_turn(self._subjects, number)
            self._progress(f"round {number + 1} of {rounds}")
            plan = self._plan
            for subject in order:
                self._measured(subject, [1] * plan.few, self._few)
            for subject in order if plan.some else ():
                if subject in HAS_BARRIER:
                    self._measured(subject, [plan.some], self._some)
            for subject in order:
                self._measured(subject, [plan.many], self._many)
            for size, times in plan.registrations:
                for subject in order:
                    if subject in HAS_REGISTRATION and number < times:
                        self._measured(subject, [size], self._registered)
            self._restart()

    def raw(self) -> dict[str, Series]:
        """The series by name."""
        order = {subject: place for place, subject in enumerate(self._subjects)}
        rows = sorted(self._rows.items(), key=lambda row: order[row[0][0].split()[0]])
        return {name: Series(tuple(values), unit=unit) for (name, unit), values in rows}

    def _add(self, name: str, unit: str, value: float) -> None:
        self._rows[name, unit].append(value)

    def _measured(self, subject: str, sizes: list[int], measure: Callable[[str, Fleet, int], None]) -> None:
        folder = self._folder / "one"
        folder.mkdir()
        try:
            with (
                service(subject, folder, sum(sizes)) as server,
                fleet(subject, server.address, sizes) as clients,
            ):
                server.await_ready()
                measure(subject, clients, sum(sizes))
                clients.do("close")
        except (RuntimeError, TimeoutError) as error:
            if subject == "holdfast":
                raise
            self.failures.append(f"{subject}, {sum(sizes)} clients: {error}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    # ---- what is measured at each size

    def _few(self, subject: str, clients: Fleet, size: int) -> None:
        plan = self._plan
        clients.do("connect")
        if subject in HAS_BARRIER:
            self._barriers(subject, clients, size, plan.barriers_few)
        clients.do("latency", max(1, plan.latencies // 10), alone=True)
        ((sets, gets),) = clients.do("latency", plan.latencies, alone=True).found
        self._add(f"{subject} set, one client", "ms", _ms(sets))
        self._add(f"{subject} get, one client", "ms", _ms(gets))

    def _some(self, subject: str, clients: Fleet, size: int) -> None:
        clients.do("connect")
        self._barriers(subject, clients, size, self._plan.barriers_many)

    def _many(self, subject: str, clients: Fleet, size: int) -> None:
        plan = self._plan
        connected = clients.do("connect")
        if subject in HAS_REGISTRATION:
            self._add(f"{subject} registration, {size:,} clients", "s", connected.seconds)
        if subject in HAS_BARRIER:
            self._barriers(subject, clients, size, plan.barriers_many)
        clients.do("exchange", 2)
        for what, times, calls, name in (
            ("exchange", plan.exchanges, 2, "set and get"),
            ("sets", plan.sets, 1, "set"),
        ):
            seconds = statistics.median(clients.do(what, times).seconds for _ in range(plan.repeats))
            self._add(f"{subject} {name}, {size:,} clients", "/s", times * calls * size / seconds)

    def _registered(self, subject: str, clients: Fleet, size: int) -> None:
        connected = clients.do("connect")
        self._add(f"{subject} registration, {size:,} clients", "s", connected.seconds)
        self._barriers(subject, clients, size, 5)

    def _barriers(self, subject: str, clients: Fleet, size: int, times: int) -> None:
        clients.do("barrier", max(2, times // 10))
        periods = clients.do("barrier", times).found[0]
        self._add(f"{subject} barrier, {size:,} clients", "ms", _ms(periods))

    def _restart(self) -> None:
        """Kill Holdfast's coordinator under its clients, and wait until each of them has been answered."""
        plan = self._plan
        sizes = [plan.many, *[1] * plan.few]
        folder = self._folder / "restart"
        folder.mkdir()
        try:
            with (
                Coordinator(folder, sum(sizes)) as coordinator,
                fleet("holdfast", coordinator.address, sizes) as clients,
            ):
                coordinator.await_ready()
                clients.do("connect")
                clients.do("sets", 2)
                killed = moment()
                coordinator.restart_killed()
                answered = clients.do("sets", 1)
                self._add(f"holdfast restart, {sum(sizes)} clients", "s", answered.ended - killed)
                clients.do("barrier", 1)  # every member is still in
                clients.do("close")
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _ms(seconds: Iterable[float]) -> float:
    return statistics.median(seconds) * 1000
