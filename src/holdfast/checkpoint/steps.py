"""Which steps a folder holds, and what each of them is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from holdfast.errors import FormatError, HoldfastError, NoCheckpointError
from holdfast.format import MANIFEST, Manifest, parse_step_folder, read_manifest, step_folder
from holdfast.storage import LocalStore
from holdfast.vault import WORK

PINS: Final = "pins"


@dataclass(frozen=True, slots=True)
class StepInfo:
    """A committed step, as its manifest describes it."""

    step: int
    created: float
    nbytes: int
    num_arrays: int
    num_parts: int
    attempt: str
    meta: Mapping[str, Any]
    pinned: bool = False

    @property
    def samples(self) -> int | None:
        """Samples consumed when the step was saved, if the run stored them in the metadata."""
        value = self.meta.get("samples")
        return value if type(value) is int else None

    def metric(self, name: str) -> float | None:
        """A number under that name in the metadata, or under its `metrics`."""
        metrics = self.meta.get("metrics")
        nested = metrics.get(name) if isinstance(metrics, Mapping) else None
        value = nested if nested is not None else self.meta.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            return None
        try:
            return float(value)
        except OverflowError:  # an int beyond every float
            return math.inf if value > 0 else -math.inf


def committed_steps(store: LocalStore) -> list[int]:
    """The steps with a manifest, ascending. Says nothing about whether they verify."""
    found = []
    for name in store.names():
        step = parse_step_folder(name)
        if step is not None and store.exists(name, MANIFEST):
            found.append(step)
    return sorted(found)


def steps_in(*stores: LocalStore) -> list[int]:
    """The steps that are committed in any of these folders, ascending."""
    return sorted({step for store in stores for step in committed_steps(store)})


def step_manifest(store: LocalStore, step: int) -> Manifest:
    """The manifest of a committed step. Fails: NoCheckpointError, FormatError."""
    folder = step_folder(step)
    if not store.exists(folder, MANIFEST):
        steps = committed_steps(store)
        raise NoCheckpointError(
            f"there is no step {step} in {store.root}",
            hint=f"steps there: {_listed(steps)}" if steps else "no step has been saved there",
        )
    manifest = read_manifest(store, folder)
    if manifest.save.step != step:
        raise FormatError(
            f"{folder}: its manifest is that of step {manifest.save.step}",
            hint="the folder was renamed; give it its own name back",
        )
    return manifest


def step_info(store: LocalStore, step: int) -> StepInfo:
    """What a committed step is. Fails: NoCheckpointError, FormatError."""
    manifest = step_manifest(store, step)
    return StepInfo(
        step=step,
        created=manifest.created,
        nbytes=manifest.nbytes,
        num_arrays=len(manifest.arrays),
        num_parts=len(manifest.parts),
        attempt=manifest.save.attempt,
        meta=manifest.meta,
        pinned=store.exists(WORK, PINS, step_folder(step)),
    )


def readable_steps(store: LocalStore) -> tuple[list[StepInfo], dict[int, HoldfastError]]:
    """The committed steps whose manifests can be read, ascending, and why the others cannot."""
    infos: list[StepInfo] = []
    broken: dict[int, HoldfastError] = {}
    for step in committed_steps(store):
        try:
            infos.append(step_info(store, step))
        except HoldfastError as error:
            broken[step] = error
    return infos, broken


def _listed(steps: list[int], most: int = 12) -> str:
    shown = ", ".join(map(str, steps[-most:]))
    return f"… {shown}" if len(steps) > most else shown
