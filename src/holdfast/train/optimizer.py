"""How the sum of the gradients of a step changes the parameters: settings. The arithmetic is in `update`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from holdfast.arrays import match
from holdfast.errors import UsageError
from holdfast.train.overrides import loose
from holdfast.train.problems import Problem, at_least
from holdfast.train.references import reference_problems

if TYPE_CHECKING:
    from holdfast.train.update import Optimizer


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay, after clipping by the global norm. Moments are float32.

    Another optax transformation takes Adam's place by its name; clipping, weight decay and the rate stay.
    """

    b1: float = 0.9
    """How slowly the mean of the gradients moves."""
    b2: float = 0.95
    """How slowly the mean of their squares moves."""
    eps: float = 1e-8
    """Added to the root of the mean of squares."""
    weight_decay: float = 0.1
    """Share of a parameter taken away at rate 1; the rate's ramp may override it (`rate.wd_*`)."""
    clip: float = 1.0
    """The longest that the gradient of a whole step may be; 0: no clipping."""
    no_decay: tuple[str, ...] = ("**/*norm*", "**/*bias*")
    """Name patterns of parameters that do not decay."""
    fp32_accumulation: tuple[str, ...] = ("*",)
    """Name patterns of parameters whose microbatch gradients are added in float32; others in their own."""
    flat_shards: int = 0
    """Moments as flat, padded buffers for so many members of the fsdp axis: they divide whatever the shapes
    are. 0: each moment lies as its parameter does. For transformations that work element by element."""
    transformation: str = ""
    """`module:function` or `path/to/file.py:function` that makes an optax transformation, such as
    `optax:lion`; empty: Adam. It is to step at a rate of 1 and not to decay: both are applied here."""
    arguments: tuple[str, ...] = ()
    """What that function is called with, each `name=value`: `learning_rate=1.0`, `weight_decay=0.0`."""
    skip_nonfinite: bool = True
    """Leave the state as it is in a step whose gradient is not finite; it is counted as skipped."""

    @property
    def named(self) -> str:
        """What makes the steps, for people and for checkpoints: `adamw`, `optax:lion(learning_rate=1.0)`."""
        return f"{self.transformation}({', '.join(self.arguments)})" if self.transformation else "adamw"

    @property
    def keywords(self) -> dict[str, Any]:
        """The arguments by name. Values are JSON or bare words."""
        pairs = (argument.partition("=") for argument in self.arguments)
        return {name.strip(): loose(value.strip()) for name, _, value in pairs}

    def problems(self) -> list[Problem]:
        """Every mistake in these settings. Looks for the transformation, and does not run it."""
        found: list[Problem] = self._named_problems()
        for name in ("b1", "b2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                found.append(Problem(f"optimizer.{name}", f"is {value}", "it must be in 0..1, without the 1"))
        if self.eps <= 0:
            found.append(Problem("optimizer.eps", f"is {self.eps}", "it must be more than 0"))
        found += at_least("optimizer.weight_decay", self.weight_decay, 0)
        found += at_least("optimizer.clip", self.clip, 0)
        found += at_least("optimizer.flat_shards", self.flat_shards, 0)
        for name in ("no_decay", "fp32_accumulation"):
            for pattern in getattr(self, name):
                try:
                    match(pattern, "name")
                except UsageError as error:
                    found.append(Problem(f"optimizer.{name}", f"holds {pattern!r}", error.message))
        return found

    def _named_problems(self) -> list[Problem]:
        """What is wrong with the transformation's name and arguments; settings that it leaves idle."""
        if not self.transformation:
            if not self.arguments:
                return []
            message = f"is {','.join(self.arguments)}, and nothing is called with it"
            hint = "name what is: optimizer.transformation=optax:lion"
            return [Problem("optimizer.arguments", message, hint)]
        without = "leave optimizer.transformation empty for AdamW"
        found = reference_problems("optimizer.transformation", self.transformation, without=without)
        names = [argument.partition("=")[0].strip() for argument in self.arguments]
        for argument, name in zip(self.arguments, names, strict=True):
            if "=" not in argument or not name.isidentifier():
                hint = "write name=value, more of them with commas between"
                found.append(Problem("optimizer.arguments", f"holds {argument!r}", hint))
            elif names.count(name) > 1 and f"{name} twice" not in "".join(one.message for one in found):
                found.append(Problem("optimizer.arguments", f"has {name} twice", "give each once"))
        for name in ("b1", "b2", "eps"):
            value = getattr(self, name)
            if value != type(self).__dataclass_fields__[name].default:
                message = f"is {value}, which is Adam's, and {self.transformation} takes its place"
                hint = f"optimizer.arguments={name}={value}, if that function has such an argument"
                found.append(Problem(f"optimizer.{name}", message, hint))
        return found

    def build(self, transformation: Any = None) -> Optimizer:
        """The optimizer. `transformation` is any optax transformation, to take the place of what is named.

        It gets clipped mean gradients and gives what to add to the parameters at a learning rate of one:
        `optax.lion(1.0, weight_decay=0.0)`, `optax.sgd(1.0, momentum=0.9)`. Rate and weight decay are applied
        here: one that decays by itself would do so twice. Without one, the function that is named is run.
        Fails: ConfigError, if that makes no transformation.
        """
        from holdfast.train.transformations import made
        from holdfast.train.update import Optimizer

        if transformation is None and self.transformation:
            transformation = made(self)
        return Optimizer(self, transformation)
