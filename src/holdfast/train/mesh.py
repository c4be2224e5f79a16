"""One mesh with named axes, and the rules that put logical dims on it. Pure: nothing here imports JAX.

A parameter or an activation names its dims (`embed`, `heads`, `vocab`, ...); one table says which mesh axis
each name lies on. No layer knows a mesh axis.

    data      copies of the model; each works on its share of a batch
    fsdp      the same, and the copies share the state between them (ZeRO)
    tensor    one sample is worked on together: heads, MLP, vocabulary are split; between them, the sequence

ZeRO is a choice of where three trees rest: what is *stored* has `embed` on the fsdp axis, what is *computed
with* has not.

              parameters   gradients   optimizer
    zero 1    computed     computed    stored
    zero 2    computed     stored      stored
    zero 3    stored       stored      stored
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from holdfast.train.model.config import ModelConfig
from holdfast.train.problems import Problem, at_least, refuse

if TYPE_CHECKING:
    import jax

    from holdfast.train.placement import Layout

DATA: Final = "data"
FSDP: Final = "fsdp"
TENSOR: Final = "tensor"
AXES: Final = (DATA, FSDP, TENSOR)

Logical = tuple[str | None, ...]
"""The names of an array's dims; None is a dim that is never split."""
Split = tuple[str | tuple[str, ...] | None, ...]
"""The mesh axes that each dim lies on."""

RULES: Final[Mapping[str, tuple[str, ...]]] = {
    "batch": (DATA, FSDP),
    "sequence": (TENSOR,),
    "heads": (TENSOR,),
    "kv_heads": (TENSOR,),
    "mlp": (TENSOR,),
    "vocab": (TENSOR,),
}
"""Where dims lie while they are computed with; names that are not here (`embed`, `head_dim`) are whole."""


@final
@dataclass(frozen=True, slots=True)
class Rules:
    """The table for one mesh: logical names in, mesh axes out."""

    sizes: tuple[tuple[str, int], ...]
    """Each mesh axis with its size."""
    sequence_parallel: bool = True

    def computed(self, logical: Logical) -> Split:
        """Where an array lies while it is computed with. `sequence` is that of the residual stream."""
        return tuple(self._axes(name) for name in logical)

    def size(self, axis: str) -> int:
        """Devices along a mesh axis."""
        return dict(self.sizes)[axis]

    def _axes(self, name: str | None) -> str | tuple[str, ...] | None:
        if name is None or (name == "sequence" and not self.sequence_parallel):
            return None
        axes = tuple(axis for axis in RULES.get(name, ()) if self.size(axis) > 1)
        return axes if len(axes) > 1 else axes[0] if axes else None

    def stored(self, logical: Logical, shape: Sequence[int]) -> Split:
        """Where an array rests: as computed with, and `embed` on the fsdp axis.

        Where the axis does not divide `embed`, or there is no such dim, the largest other dim that it divides
        is taken (the first of equals); where there is none, every copy holds it all. Nothing is padded.
        """
        size = self.size(FSDP)
        split = list(self.computed(logical))
        free = [dim for dim, axes in enumerate(split) if axes is None and shape[dim] % size == 0]
        chosen = [dim for dim in free if logical[dim] == "embed"] or sorted(
            (dim for dim in free if logical[dim] != "layers"), key=lambda dim: (-shape[dim], dim)
        )
        if size > 1 and chosen and shape[chosen[0]] > 0:
            split[chosen[0]] = FSDP
        return tuple(split)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig:
    """How the devices of one replica share the work and the state."""

    data: int = 1
    """Copies that share nothing but the sum of gradients."""
    fsdp: int = 1
    """Copies that also share optimizer state, gradients or parameters, as `zero` says."""
    tensor: int = 1
    """Devices that work on one sample together."""
    zero: int = 3
    """What the fsdp axis splits: 1 the optimizer's state, 2 gradients too, 3 parameters too."""
    sequence_parallel: bool = True
    """Whether the tensor axis also splits the residual stream between blocks, along the sequence."""

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.data * self.fsdp * self.tensor

    @property
    def rules(self) -> Rules:
        """Which mesh axis each logical dim lies on."""
        sizes = ((DATA, self.data), (FSDP, self.fsdp), (TENSOR, self.tensor))
        return Rules(sizes, self.sequence_parallel and self.tensor > 1)

    def boxes(self, split: Split, owners: Sequence[int]) -> list[set[tuple[int, ...]]]:
        """Which boxes of an array that lies so each process has. `owners` names the process of each device,
        in the order of the mesh."""
        axes = [
            axis for one in split if one is not None for axis in ((one,) if isinstance(one, str) else one)
        ]
        held: dict[int, set[tuple[int, ...]]] = {}
        for at, owner in enumerate(owners):
            rest, tensor = divmod(at, self.tensor)
            place = dict(zip(AXES, (*divmod(rest, self.fsdp), tensor), strict=True))
            held.setdefault(owner, set()).add(tuple(place[axis] for axis in axes))
        return list(held.values())

    def problems(
        self,
        *,
        model: ModelConfig | None = None,
        seq_len: int | None = None,
        num_devices: int | None = None,
    ) -> list[Problem]:
        """Everything that is wrong: alone, for a model, for the devices."""
        found = [one for axis in AXES for one in at_least(f"mesh.{axis}", getattr(self, axis), 1)]
        if self.zero not in (1, 2, 3):
            found.append(Problem("mesh.zero", f"is {self.zero}", "choose 1, 2 or 3"))
        if found:
            return found  # what follows divides by these
        if num_devices is not None and num_devices % self.num_devices:
            found.append(self._wrong_devices(num_devices))
        if model is not None:
            found += self._tensor_problems(model, seq_len)
        return found

    def _wrong_devices(self, num_devices: int) -> Problem:
        shape = " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES)
        message = f"is {shape} = {self.num_devices} devices, and here are {num_devices}"
        rest = self.fsdp * self.tensor
        if num_devices % rest == 0:
            return Problem("mesh", message, f"set mesh.data={num_devices // rest}")
        if num_devices % self.tensor == 0:
            fsdp = num_devices // self.tensor
            return Problem("mesh", message, f"set mesh.data=1 mesh.fsdp={fsdp}")
        fit = _numbers(n for n in range(1, num_devices + 1) if num_devices % n == 0)
        return Problem("mesh", message, f"make the product one of {fit}")

    def _tensor_problems(self, model: ModelConfig, seq_len: int | None) -> list[Problem]:
        if self.tensor == 1:
            return []
        counts = {
            "model.num_heads": model.num_heads,
            "model.num_kv_heads": model.kv_heads,
            "model.mlp_hidden": model.mlp_hidden,
            "model.vocab_size": model.vocab_size,
        }
        if seq_len is not None and self.sequence_parallel:
            counts["seq_len"] = seq_len
        wrong = {name: count for name, count in counts.items() if count % self.tensor}
        if not wrong:
            return []
        largest = math.gcd(*counts.values())
        fit = _numbers(n for n in range(1, largest + 1) if largest % n == 0)
        seen = " and ".join(f"{name}={count}" for name, count in wrong.items())
        hint = f"mesh.tensor may be {fit}"
        if "model.vocab_size" in wrong:
            padded = -(-model.vocab_size // self.tensor) * self.tensor
            hint += f"; or pad the vocabulary: model.vocab_size={padded}"
        if set(wrong) == {"seq_len"}:
            hint += "; or set mesh.sequence_parallel=false"
        return [Problem("mesh.tensor", f"is {self.tensor}, which does not divide {seen}", hint)]

    def build(self, devices: Sequence[jax.Device] | None = None) -> Layout:
        """The mesh over `devices`, or over the first of all that are here, in their order (tensor innermost).

        Fails: ConfigError if the mesh is wrong or needs more devices than there are.
        """
        refuse(self.problems())
        from holdfast.train.placement import Layout

        return Layout(self, devices)


def _numbers(values: Iterable[int], most: int = 8) -> str:
    numbers = list(values)
    shown = numbers if len(numbers) <= most else [*numbers[: most // 2], *numbers[-most // 2 :]]
    return ", ".join(str(n) for n in shown)
