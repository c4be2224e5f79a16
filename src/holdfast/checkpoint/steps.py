"""Which steps a folder holds, and what each of them is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from holdfast.errors import FormatError, HoldfastError, NoCheckpointError
from holdfast.format import MANIFEST, Manifest, parse_step_folder, read_manifest, step_folder
from holdfast.storage import Store
from holdfast.vault import WORK

PINS: Final = "pins"
T = TypeVar("T")


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


def committed_steps(store: Store) -> list[int]:
    """The steps with a manifest, ascending. Says nothing about whether they verify."""
    steps = {name: step for name in store.names() if (step := parse_step_folder(name)) is not None}
    return sorted(steps[name] for name in store.having(list(steps), MANIFEST))


def step_manifest(store: Store, step: int) -> Manifest:
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


def step_info(store: Store, step: int) -> StepInfo:
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


def readable_steps(store: Store) -> tuple[list[StepInfo], dict[int, HoldfastError]]:
    """The committed steps whose manifests can be read, ascending, and why the others cannot."""
    infos: list[StepInfo] = []
    broken: dict[int, HoldfastError] = {}
    steps = committed_steps(store)
    for step, found in zip(steps, each(store, steps, _info_or_error), strict=True):
        if isinstance(found, StepInfo):
            infos.append(found)
        else:
            broken[step] = found
    return infos, broken


def _info_or_error(store: Store, step: int) -> StepInfo | HoldfastError:
    try:
        return step_info(store, step)
    except HoldfastError as error:
        return error


def each(store: Store, steps: Sequence[int], look: Callable[[Store, int], T]) -> list[T]:
    """What `look` finds for each step, in order; several at a time where the store is far away."""
    if store.at_once == 1 or len(steps) < 2:
        return [look(store, step) for step in steps]
    with ThreadPoolExecutor(min(store.at_once, len(steps)), thread_name_prefix="holdfast-look") as pool:
        return list(pool.map(lambda step: look(store, step), steps))


def _listed(steps: list[int], most: int = 12) -> str:
    shown = ", ".join(map(str, steps[-most:]))
    return f"… {shown}" if len(steps) > most else shown
