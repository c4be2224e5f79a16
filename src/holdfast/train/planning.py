"""What a run will be, worked out from its config alone: sizes, steps, operations, memory, layout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, final

from holdfast.train.config import TrainConfig
from holdfast.train.devices import Device
from holdfast.train.flops import CONVENTION, model_flops
from holdfast.train.memory import Memory, memory
from holdfast.train.mesh import AXES, MeshConfig, Split
from holdfast.train.overrides import settings_of
from holdfast.train.parameters import Parameter, parameters, split_of
from holdfast.train.settings import EvaluationConfig

POINTS: Final = 129
"""Of the curve of the learning rate."""
_ROOM: Final = 0.92
"""What of a device's memory a program can count on; the rest is the runtime's and lost to fragments."""
_SIZES: Final = tuple(2**power for power in range(13))


@final
@dataclass(frozen=True, slots=True)
class PhaseRow:
    """A stretch of steps with one batch size."""

    step: int
    samples: int
    tokens: int
    size: int
    num_steps: int
    tokens_per_step: int
    flops_per_step: int
    microbatches: int
    """How often the model runs for a lane, or for the whole batch where there are none."""


@final
@dataclass(frozen=True, slots=True)
class ArrayRow:
    """Parameters of one kind: where they rest and where they are computed with."""

    name: str
    count: int
    shape: tuple[int, ...]
    rests: str
    computed: str


@final
@dataclass(frozen=True, slots=True)
class Replica:
    """The smallest replica that fits, as settings."""

    num_devices: int
    settings: tuple[str, ...]
    """What to change, all of it; empty: nothing."""
    memory: Memory


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """What `holdfast plan` shows. Bytes are for each device unless they say otherwise."""

    name: str
    digest: str
    num_params: int
    params: dict[str, int]
    """Parameters by what they are for."""
    flops_per_token: float
    convention: str
    lanes: int
    micro: int
    phases: tuple[PhaseRow, ...]
    total_steps: int
    total_samples: int
    """Those of whole batches: the last may go beyond `samples`."""
    total_tokens: int
    total_flops: int
    rate: tuple[tuple[int, float], ...]
    """Samples consumed, and the learning rate then."""
    mesh: dict[str, int]
    layout: tuple[ArrayRow, ...]
    memory: Memory
    state_bytes: int
    """Of a whole replica: what a checkpoint holds."""
    sums_bytes: int
    """Of gradients, which replicas add up in every step; 0: one world, XLA does it."""
    device: str
    device_memory: int
    """0: not known."""
    smallest: Replica | None
    """None: not even the largest mesh that the batch allows has room, or the device's memory is not known."""


def plan(config: TrainConfig, device: Device) -> Plan:
    """The plan of a run on devices of one kind. The config must be free of mistakes."""
    found = parameters(config.model)
    schedule = config.batches
    total_steps = config.total_steps
    samples = schedule.samples_at(total_steps)
    phases = _phases(config)
    whole = memory(replace(config, mesh=MeshConfig()))
    return Plan(
        name=config.name,
        digest=config.digest,
        num_params=sum(one.size for one in found),
        params=_by_purpose(found),
        flops_per_token=model_flops(config.model, 1, config.seq_len).total / config.seq_len,
        convention=CONVENTION,
        lanes=config.batch.lanes,
        micro=config.batch.micro,
        phases=phases,
        total_steps=total_steps,
        total_samples=samples,
        total_tokens=samples * config.seq_len,
        total_flops=sum(row.num_steps * row.flops_per_step for row in phases),
        rate=_curve(config),
        mesh={**{axis: getattr(config.mesh, axis) for axis in AXES}, "zero": config.mesh.zero},
        layout=_layout(found, config.mesh),
        memory=memory(config, device.platform),
        state_bytes=whole.params + whole.optimizer,
        sums_bytes=whole.sums if config.batch.lanes else 0,
        device=device.name,
        device_memory=device.memory,
        smallest=smallest_replica(config, device),
    )


def smallest_replica(config: TrainConfig, device: Device) -> Replica | None:
    """The fewest devices of a kind on which a replica of this run fits, and how; None: there is none.

    State is split over fsdp first, since that leaves products whole, and over tensor where a sample alone is
    too much. A microbatch has at least one sample for each copy, and is as large as asked for if that fits.
    """
    if device.memory <= 0:
        return None
    for num_devices in _SIZES:
        for tensor in (size for size in _SIZES if num_devices % size == 0):
            for tried in _shaped(config, num_devices // tensor, tensor):
                needed = memory(tried, device.platform)
                if needed.total <= _ROOM * device.memory:
                    return Replica(num_devices, _changed(config, tried), needed)
    return None


def _shaped(config: TrainConfig, fsdp: int, tensor: int) -> Iterator[TrainConfig]:
    """The config on such a mesh, free of mistakes: with the microbatch asked for, then with the smallest."""
    zero = 3 if fsdp > 1 else config.mesh.zero
    shaped = replace(
        config,
        mesh=replace(config.mesh, data=1, fsdp=fsdp, tensor=tensor, zero=zero),
        optimizer=replace(config.optimizer, flat_shards=fsdp if config.optimizer.flat_shards else 0),
        evaluation=_evaluated(config.evaluation, fsdp),
    )
    micro = config.batch.micro
    for size in dict.fromkeys((micro, fsdp)) if micro else (0,):
        tried = replace(shaped, batch=replace(config.batch, micro=size))
        if not tried.problems():
            yield tried


def _evaluated(before: EvaluationConfig, copies: int) -> EvaluationConfig:
    """As it was where so many copies can share its batches; otherwise in the smallest that they can."""
    if not before.every or before.batch % copies == 0:
        return before
    return replace(before, batch=copies, samples=-(-before.samples // copies) * copies)


def _changed(before: TrainConfig, after: TrainConfig) -> tuple[str, ...]:
    old, new = settings_of(before), settings_of(after)
    return tuple(f"{name}={value}" for name, value in new.items() if value != old[name])


def _phases(config: TrainConfig) -> tuple[PhaseRow, ...]:
    schedule, total = config.batches, config.total_steps
    shown = [phase for phase in schedule.phases if phase.step < total]
    ends = [phase.step for phase in shown[1:]] + [total]
    return tuple(
        PhaseRow(
            step=phase.step,
            samples=phase.start,
            tokens=phase.start * config.seq_len,
            size=phase.size,
            num_steps=end - phase.step,
            tokens_per_step=phase.size * config.seq_len,
            flops_per_step=model_flops(config.model, phase.size, config.seq_len).total,
            microbatches=config.batch.microbatches(phase.size),
        )
        for phase, end in zip(shown, ends, strict=True)
    )


def _curve(config: TrainConfig) -> tuple[tuple[int, float], ...]:
    last = config.samples
    corners = {place for place in (config.rate.warmup, config.rate.decay) if place <= last}
    places = sorted({last * at // (POINTS - 1) for at in range(POINTS)} | corners)
    return tuple((samples, config.learning_rate(samples)) for samples in places)


def _by_purpose(found: list[Parameter]) -> dict[str, int]:
    purposes = {"embed": "embedding", "head": "output", "qkv": "attention", "out": "attention"}
    purposes |= {"gate": "MLP", "up": "MLP", "down": "MLP"}
    sums: dict[str, int] = {}
    for one in found:
        purpose = purposes.get(one.name.rpartition("/")[2], "norms and biases")
        sums[purpose] = sums.get(purpose, 0) + one.size
    return sums


def _layout(found: list[Parameter], mesh: MeshConfig) -> tuple[ArrayRow, ...]:
    rows: dict[tuple[str, tuple[int, ...]], ArrayRow] = {}
    for one in found:
        key = re.sub(r"/\d+/", "/*/", one.name), one.shape
        before = rows.get(key)
        rows[key] = ArrayRow(
            name=key[0],
            count=before.count + 1 if before else 1,
            shape=one.shape,
            rests=_text(one, split_of(one, mesh, stored=mesh.zero >= 3), mesh),
            computed=_text(one, split_of(one, mesh, stored=False), mesh),
        )
    return tuple(rows.values())


def _text(parameter: Parameter, split: Split, mesh: MeshConfig) -> str:
    """Where it lies, in words: `embed/fsdp 2, heads/tensor 4`; `whole` if it is not split."""
    sizes = dict(mesh.rules.sizes)
    parts = []
    for dim, (name, axes) in enumerate(zip(parameter.logical, split, strict=True)):
        for axis in () if axes is None else (axes,) if isinstance(axes, str) else axes:
            if sizes[axis] > 1:
                parts.append(f"{name or f'dim {dim}'}/{axis} {sizes[axis]}")
    return ", ".join(parts) or "whole"
