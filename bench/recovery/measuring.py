"""The measurements, one after the other."""

from __future__ import annotations

import signal
import statistics
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import final

from bench.recovery import ours, peers
from bench.report import Series

REPLICAS = 3
_SNAPSHOT_MB = 100
_SAVES = 10
"""Steps between two saves where all is lost: the next step is one that had been done, up to so many."""


@final
class Measuring:
    """Runs the parts that are wanted and keeps what they gave."""

    def __init__(
        self,
        folder: Path,
        rounds: int,
        wanted: set[str],
        minutes: float,
        smoke: bool,
        progress: Callable[[str], None],
    ) -> None:
        self._folder, self._rounds, self._wanted = folder, rounds, wanted
        self._minutes, self._smoke, self._progress = minutes, smoke, progress
        self.values: dict[str, float | None] = {}
        self.raw: dict[str, Series] = {}
        self.notes: list[str] = []

    def run(self) -> None:
        """Measure; what fails is a note, and the rest goes on."""
        for name, part in (
            ("lost", self._lost),
            ("hang", self._hang),
            ("group", self._group),
            ("all", self._all),
            ("overhead", self._overhead),
            ("snapshot", self._snapshot),
            ("peers", self._peers),
            ("goodput", self._goodput),
        ):
            if self._wanted and name not in self._wanted:
                continue
            if self._smoke and name in ("peers", "goodput", "all", "group", "snapshot"):
                continue
            self._progress(f"recovery: {name}")
            try:
                part()
            except Exception as error:
                self.notes.append(f"failed: {name}: {error}")
        if self._smoke:
            self.notes.append("a smoke run: the numbers mean nothing")

    def _keep(self, what: str, values: list[float], unit: str = "s") -> float:
        self.raw[what] = Series(tuple(values), unit)
        return statistics.median(values)

    def _lost(self) -> None:
        found = []
        with ours.launched(self._folder, "lost", replicas=REPLICAS) as run:
            for _ in range(self._rounds):
                found.append(ours.replica_lost(run, REPLICAS))
        self.values["replica_lost_s"] = self._keep("replica lost, next step", [one for one, _ in found])
        self.values["standby_back_s"] = self._keep("replica lost, all back", [two for _, two in found])

    def _hang(self) -> None:
        found = []
        with ours.launched(self._folder, "hang", replicas=REPLICAS) as run:
            for _ in range(self._rounds):
                found.append(ours.hung(run, REPLICAS))
        self._keep("SIGSTOP, next step", [took for took, _ in found])
        self.values["hang_s"] = self._keep(
            "... beyond three steps", [took - 3 * step for took, step in found]
        )

    def _group(self) -> None:
        with ours.launched(self._folder, "group", replicas=1, workers=2, parked=2, save_every=5) as run:
            found = [ours.group_replaced(run, 2) for _ in range(self._rounds)]
        self.values["group_replaced_s"] = self._keep("replica of 2 replaced, next step", found)

    def _all(self) -> None:
        for key, vault_too in (("all_lost_s", False), ("all_lost_disk_s", True)):
            with ours.launched(self._folder, key, replicas=REPLICAS, save_every=_SAVES) as run:
                found = [
                    ours.all_lost(run, REPLICAS, vault_too=vault_too, saves=_SAVES)
                    for _ in range(self._rounds)
                ]
            title = f"all lost{', vault too' if vault_too else ''}, next step"
            self.values[key] = self._keep(title, [took for took, _ in found])
            self.notes.append(f"{title}: the state came from {', '.join(sorted({at for _, at in found}))}")

    def _overhead(self) -> None:
        with ours.launched(self._folder, "overhead", replicas=REPLICAS) as run:
            outside, inside = ours.cpu_per_step(run, REPLICAS, 5 if self._smoke else 100)
        self._keep("CPU of agent, coordinator, vault and launch per step", [1e3 * outside], "ms")
        self._keep("CPU of Holdfast's threads in workers per step", [1e3 * inside], "ms")
        self.values["overhead_ms"] = 1e3 * (outside + inside)

    def _snapshot(self) -> None:
        found = ours.snapshots(self._folder, saves=2 * self._rounds, megabytes=_SNAPSHOT_MB)
        snapshot, memcpy = (
            self._keep(f"{what} of {_SNAPSHOT_MB} MB", [1e3 * one for one in values], "ms")
            for what, values in zip(("snapshot", "memcpy"), zip(*found, strict=True), strict=True)
        )
        self.values["snapshot_vs_memcpy"] = snapshot / memcpy

    def _peers(self) -> None:
        if "replica_lost_s" not in self.values:
            self._lost()
        ours_s = self.values.get("replica_lost_s")
        for key, package, times in (
            ("vs_torchrun", "torch", peers.torchrun_times),
            ("vs_restart_orbax", "orbax", peers.orbax_times),
        ):
            if find_spec(package) is None:
                self.notes.append(f"not installed, so not measured: {package}")
                continue
            folder = self._folder / key
            folder.mkdir()
            median = self._keep(
                f"{key.removeprefix('vs_')}, next step", times(folder, REPLICAS, self._rounds)
            )
            if ours_s:
                self.values[key] = median / ours_s

    def _goodput(self) -> None:
        per_step = self._step_s()
        steps = max(50, int(self._minutes * 60 / per_step))
        self._progress(f"recovery: undisturbed, {steps} steps")
        plain, digest = ours.undisturbed(self._folder, "undisturbed", steps, replicas=REPLICAS)
        self._keep("undisturbed run", [plain])
        kills, both = (int(signal.SIGKILL),), (int(signal.SIGKILL), int(signal.SIGSTOP))
        for key, mtbf_s, signals in (
            ("goodput_60s", 60.0, kills),
            ("goodput_15s", 15.0, kills),
            ("goodput_15s_mixed", 15.0, both),
        ):
            self._progress(f"recovery: {key}")
            took, found, losses = ours.disturbed(
                self._folder,
                key,
                steps,
                replicas=REPLICAS,
                mtbf_s=mtbf_s,
                seed=7,
                signals=signals,
            )
            self._keep(f"{key}: {losses} losses", [took])
            if found == digest:
                self.values[key] = plain / took
            else:
                self.notes.append(f"failed: {key}: the final state differs from the undisturbed run's")

    def _step_s(self) -> float:
        with ours.launched(self._folder, "pace", replicas=REPLICAS, steps="60") as run:
            took, _ = ours.finished(run)
        return took / 59
