"""The optax transformation that a config names: made, tried on shapes, and told from another one."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final

import jax
import numpy as np
import optax
import xxhash

from holdfast.arrays import flatten_tree
from holdfast.errors import UsageError
from holdfast.train.model.config import ModelConfig
from holdfast.train.optimizer import OptimizerConfig
from holdfast.train.parameters import parameters
from holdfast.train.problems import Problem, refuse
from holdfast.train.references import loaded
from holdfast.train.update import owners

_SETTING: Final = "optimizer.transformation"
_WANTED: Final = "a function that returns an optax transformation, such as optax:lion"
_ADDRESS: Final = re.compile(r"0x[0-9a-f]+")


def made(config: OptimizerConfig) -> Any:
    """What the named function makes. Runs it. Fails: ConfigError, if it cannot or makes something else."""
    try:
        transformation: Any = loaded(config.transformation)(**config.keywords)
    except UsageError as error:
        refuse([Problem(_SETTING, f"cannot be had: {error.message}", error.hint or "")])
        raise
    except Exception as error:  # a module and a function may raise anything
        message = f"is {config.named}, which failed: {type(error).__name__}: {error}"
        refuse([Problem(_SETTING, message, "its arguments are in optimizer.arguments")])
        raise
    if not all(callable(getattr(transformation, name, None)) for name in ("init", "update")):
        message = f"is {config.named}, which gave a {type(transformation).__name__}"
        refuse([Problem(_SETTING, message, f"name {_WANTED}")])
    return transformation


def check_fits(config: OptimizerConfig, transformation: Any, model: ModelConfig) -> None:
    """Try a named transformation on the shapes of a model; computes nothing, and needs no device.

    Fails: ConfigError, if it raises, or gives no update of every parameter.
    """
    params = shapes(model)
    try:
        state = jax.eval_shape(transformation.init, params)
        updates, after = jax.eval_shape(transformation.update, params, state, params)
    except Exception as error:  # it is anybody's code
        first = str(error).partition("\n")[0]
        message = f"is {config.named}, which cannot change this model: {type(error).__name__}: {first}"
        refuse([Problem(_SETTING, message, "update(updates, state, params) is all that it is called with")])
        raise
    wrong = ""
    if not _alike(updates, params):
        wrong = "an update of other parameters than it was given"
    elif any(one.shape != p.shape for one, p in _pairs(updates, params)):
        wrong = "an update of another shape than its parameter"
    elif _told(after) != _told(state):
        wrong = "a state that is not like the one before"
    if wrong:
        refuse([Problem(_SETTING, f"is {config.named}, which gives {wrong}", f"name {_WANTED}")])


def digest(transformation: Any, model: ModelConfig) -> str:
    """A hash of what a transformation computes for a model: of its operations and constants, not its source.

    It holds for one version of JAX and of optax, which are named in it.
    """
    params = shapes(model)
    running = xxhash.xxh3_128()
    state = jax.eval_shape(transformation.init, params)
    for fn, args in (
        (transformation.init, (params,)),
        (transformation.update, (params, state, params)),
    ):
        closed = jax.make_jaxpr(fn)(*args)
        running.update(_ADDRESS.sub("", str(closed)).encode())
        for constant in closed.consts:
            running.update(np.asarray(constant).tobytes())
    return f"jax {jax.__version__}, optax {optax.__version__}: {running.hexdigest()}"


@cache
def kept(config: OptimizerConfig, model: ModelConfig) -> tuple[dict[str, int], int]:
    """Bytes of the state that lie beside each parameter, by its name, and of all the rest. Runs the function.

    Fails: ConfigError.
    """
    transformation = made(config)
    check_fits(config, transformation, model)
    params = shapes(model)
    state = jax.eval_shape(transformation.init, params)
    names = flatten_tree(params).names()
    by_name, other = dict.fromkeys(names, 0), 0
    for leaf, owner in zip(flatten_tree(state).leaves, owners(state, params), strict=True):
        nbytes = leaf.size * leaf.dtype.itemsize
        if owner is None:
            other += nbytes
        else:
            by_name[names[owner]] += nbytes
    return by_name, other


def shapes(model: ModelConfig) -> dict[str, Any]:
    """The float32 tree of a model's parameters, as an optimizer sees it; without a device."""
    tree: dict[str, Any] = {}
    for one in parameters(model):
        *path, name = one.name.split("/")
        inner = tree
        for part in path:
            inner = inner.setdefault(part, {})
        inner[name] = jax.ShapeDtypeStruct(one.shape, np.float32)  # type: ignore[no-untyped-call]
    return tree


def _alike(one: Any, other: Any) -> bool:
    structures: tuple[object, object] = (jax.tree.structure(one), jax.tree.structure(other))
    return structures[0] == structures[1]


def _pairs(one: Any, other: Any) -> list[tuple[Any, Any]]:
    return list(zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def _told(tree: Any) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, *((one.shape, one.dtype) for one in leaves)
