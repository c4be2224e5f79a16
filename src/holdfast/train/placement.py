"""Shardings of a run on its mesh, from logical dims alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from holdfast.errors import ConfigError
from holdfast.train.mesh import AXES, FSDP, Logical, MeshConfig, Rules
from holdfast.train.problems import Problem, refuse

# Untyped in JAX.
_spec: Any = PartitionSpec
_constraint: Any = jax.lax.with_sharding_constraint

Tree = Any
"""A nested dict; its leaves are what the function says."""


@final
@dataclass(frozen=True, slots=True)
class Place:
    """Says to the compiler where an array inside a step lies. Without a mesh it says nothing."""

    mesh: Mesh | None = None
    rules: Rules = Rules((("data", 1), ("fsdp", 1), ("tensor", 1)))  # noqa: RUF009  an immutable value
    zero: int = 3

    def __call__(self, x: jax.Array, *logical: str | None) -> jax.Array:
        """`x`, lying as it is computed with. For a weight that rests in shards this is what gathers it."""
        return self._constrained(x, self.rules.computed(logical))

    def grad(self, x: jax.Array, *logical: str | None) -> jax.Array:
        """`x`, a weight's gradient, lying where gradients rest: from ZeRO 2 on in shares."""
        if self.zero == 1:
            return self(x, *logical)
        return self._constrained(x, self.rules.stored(logical, x.shape))

    @property
    def gathers(self) -> bool:
        """Whether weights rest in shares and are gathered for each use (ZeRO 3)."""
        return self.mesh is not None and self.zero == 3 and self.rules.size(FSDP) > 1

    @property
    def platform(self) -> str:
        """The kind of device that the step is for."""
        return jax.default_backend() if self.mesh is None else self.mesh.devices.flat[0].platform

    def _constrained(self, x: jax.Array, split: tuple[Any, ...]) -> jax.Array:
        if self.mesh is None:
            return x
        placed: jax.Array = _constraint(x, NamedSharding(self.mesh, _spec(*split)))
        return placed


NOWHERE: Final = Place()
"""For a step on whatever device it is called on."""


@final
class Layout:
    """Where everything of one replica lies on its mesh."""

    __slots__ = ("config", "mesh", "place")

    def __init__(self, config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> None:
        """Fails: ConfigError if the mesh needs more devices than there are, or leaves a process without."""
        here = list(jax.devices() if devices is None else devices)
        if len(here) < config.num_devices or (devices is not None and len(here) != config.num_devices):
            problems = config.problems(num_devices=len(here))
            more = ""
            if devices is None and here[0].platform == "cpu":
                more = f", or have so many CPU devices: JAX_NUM_CPU_DEVICES={config.num_devices}"
            raise ConfigError(
                [f"{problem}{more}" for problem in problems] or [f"mesh needs {config.num_devices} devices"]
            )
        refuse(_left_out(config, here))
        shape = tuple(getattr(config, axis) for axis in AXES)
        grid = np.array(here[: config.num_devices], dtype=object).reshape(shape)
        self.config = config
        self.mesh = Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
        # One device needs no constraints, and its programs read better without.
        self.place = Place(self.mesh, config.rules, config.zero) if config.num_devices > 1 else NOWHERE

    def params(self, axes: Tree, shapes: Tree) -> Tree:
        """A sharding for each parameter. `axes` are the model's; `shapes` is a tree of arrays or shapes."""
        return self._tree(axes, shapes, stored=self.config.zero >= 3)

    def grads(self, axes: Tree, shapes: Tree) -> Tree:
        """A sharding for each parameter's gradient."""
        return self._tree(axes, shapes, stored=self.config.zero >= 2)

    def optimizer(self, axes: Tree, shapes: Tree) -> Tree:
        """A sharding for each array of optimizer state that has the shape of its parameter."""
        return self._tree(axes, shapes, stored=True)

    def batch(self) -> NamedSharding:
        """The sharding of [samples, sequence] arrays: samples over data and fsdp."""
        return self._sharding(self.config.rules.computed(("batch", None)))

    def replicated(self) -> NamedSharding:
        """The sharding of what every device holds whole."""
        return self._sharding(())

    def _tree(self, axes: Tree, shapes: Tree, *, stored: bool) -> Tree:
        rules = self.config.rules

        def leaf(logical: Logical, array: Any) -> NamedSharding:
            return self._sharding(rules.stored(logical, array.shape) if stored else rules.computed(logical))

        return jax.tree.map(leaf, axes, shapes, is_leaf=lambda one: isinstance(one, tuple))

    def _sharding(self, split: tuple[Any, ...]) -> NamedSharding:
        return NamedSharding(self.mesh, _spec(*split))


def _left_out(config: MeshConfig, devices: Sequence[jax.Device]) -> list[Problem]:
    """A problem if the mesh has no device of some process: that one would have no part of a batch to read."""
    used = {device.process_index for device in devices[: config.num_devices]}
    idle = sorted({device.process_index for device in devices} - used)
    if not idle:
        return []
    which = f"process {idle[0]}" if len(idle) == 1 else f"{len(idle)} processes"
    message = (
        f"has {config.num_devices} of {len(devices)} devices, which are those of {len(used) + len(idle)} "
        f"processes: {which} would have none"
    )
    rest = config.fsdp * config.tensor
    whole = f"mesh.data={len(devices) // rest}" if len(devices) % rest == 0 else "a mesh of all devices"
    return [Problem("mesh", message, f"{whole}, or fewer processes: --workers-per-replica {len(used)}")]
