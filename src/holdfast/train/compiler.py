"""What the compiler says of a run's programs, without running them, beside the closed forms."""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass
from typing import Any, Final, final

from holdfast.train.config import TrainConfig
from holdfast.train.flops import executed_flops
from holdfast.train.memory import program_bytes, programs

_SEQUENTIAL: Final = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
_LAST_KNOWN: Final = (0, 12)
"""XLA ends the process over a flag that it does not know; jaxlib before this has it."""


def prepare(num_devices: int) -> None:
    """Set up this process to compile for CPUs as accelerators would. Before JAX starts; elsewhere no effect.

    As many CPU devices as the mesh has; and operations one after another: by default XLA's CPU compiler
    orders them for parallelism and holds twice the memory.
    """
    version = tuple(int(part) for part in importlib.metadata.version("jaxlib").split(".")[:2])
    if version < _LAST_KNOWN:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_SEQUENTIAL}".strip()
    if num_devices > 1:
        import jax

        jax.config.update("jax_num_cpu_devices", num_devices)  # type: ignore[no-untyped-call]


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """One program on one device: XLA's figures and ours."""

    program: str
    samples: int
    """In the microbatch that it is compiled for."""
    xla_flops: float | None
    """None on a GPU: XLA does not count what it hands to libraries, and those are nearly all."""
    flops: float
    xla_bytes: int
    """Arguments, results that are no argument's memory, and everything in between."""
    bytes: int

    @property
    def flops_error(self) -> float | None:
        """How far our count is from XLA's, as a share of it; None if it has none."""
        return None if self.xla_flops is None else _error(self.flops, self.xla_flops)

    @property
    def bytes_error(self) -> float:
        """How far our bytes are from XLA's, as a share of them."""
        return _error(self.bytes, self.xla_bytes)


def findings(config: TrainConfig, *, options: dict[str, Any] | None = None) -> list[Finding]:
    """Compile each program of a step for the devices here and ask XLA. Blocks: for the compiler.

    Runs nothing and takes no device memory. `options` go to the compiler. Fails: ConfigError, if there are
    fewer devices than the mesh has.
    """
    from holdfast.train.step import Steps

    steps = Steps(
        config,
        config.model.build(),
        config.mesh.build(),
        config.optimizer.build(),
        separate=config.data.separate,
    )
    samples = largest_microbatch(config)
    platform = steps.layout.mesh.devices.flat[0].platform
    return [_finding(config, steps, name, samples, platform, options) for name in programs(config)]


def largest_microbatch(config: TrainConfig) -> int:
    """The samples that go through the model at once; the most of them, where the batch grows."""
    return config.batch.micro or max(phase.size for phase in config.batches.phases)


def _finding(
    config: TrainConfig, steps: Any, name: str, samples: int, platform: str, options: dict[str, Any] | None
) -> Finding:
    compiled = getattr(steps, name).lower(*steps.examples(samples)[name]).compile(compiler_options=options)
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Finding(
        program=name,
        samples=samples,
        xla_flops=None if platform in ("gpu", "cuda") else float(cost.get("flops", 0.0)),
        flops=executed_flops(config, name, samples, platform),
        xla_bytes=held + memory.temp_size_in_bytes,
        bytes=program_bytes(config, name, samples, platform),
    )


def _error(ours: float, theirs: float) -> float:
    return (ours - theirs) / theirs if theirs else 0.0
