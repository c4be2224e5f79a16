"""Small programs to compile, and a process that compiles one of them.

    python -m tests.xla.programs FOLDER [HOLD]

With HOLD it stops itself once it has the turn to compile.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from holdfast.xla import Executable, compiled
from holdfast.xla.lowering import Compile

P: Any = jax.sharding.PartitionSpec  # shipped without types
ShapeDtypeStruct: Any = jax.ShapeDtypeStruct
KEY = b"the key of a run"


def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], Any]:
    """A training step of a small network; several fusions, a reduction and a transcendental function."""

    def loss(weights: dict[str, Any]) -> Any:
        hidden = jnp.tanh(batch @ weights["in"])
        return jnp.mean((jax.nn.softmax(hidden @ weights["out"]) - jnp.sin(batch)) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value


def values() -> tuple[dict[str, Any], Any]:
    rng = np.random.default_rng(0)
    state = {
        "in": rng.standard_normal((32, 64), np.float32),
        "out": rng.standard_normal((64, 32), np.float32),
    }
    return state, rng.standard_normal((16, 32), np.float32)


JITTED: Any = jax.jit(step, donate_argnums=0)


def jitted(mesh: Mesh | AbstractMesh) -> tuple[Any, tuple[dict[str, Any], Any]]:
    """The step with its state donated, and where its arguments lie: weights cut, batch cut."""
    cut = {"in": NamedSharding(mesh, P(None, "x")), "out": NamedSharding(mesh, P("x"))}
    return JITTED, (cut, NamedSharding(mesh, P("x")))


def placed(mesh: Mesh) -> tuple[Any, tuple[dict[str, Any], Any]]:
    """The step and its arguments on a mesh."""
    fn, places = jitted(mesh)
    args = jax.tree.map(
        lambda value, place: jax.make_array_from_callback(value.shape, place, value.__getitem__),
        values(),
        places,
    )
    return fn, args


def flat(tree: Any) -> bytes:
    """The bytes of what lies in this process."""
    return b"".join(
        np.asarray(shard.data).tobytes()
        for leaf in jax.tree.leaves(tree)
        for shard in sorted(leaf.addressable_shards, key=lambda shard: shard.device.id)
    )


def compile_here(folder: str) -> Executable:
    return compiled(jax.jit(step, donate_argnums=0), *values(), folder=folder, key=KEY, name="step")


def main() -> None:
    folder, *hold = sys.argv[1:]
    if hold:
        whole = Compile.compile

        def stopped(task: Compile) -> Any:
            print(json.dumps({"saw": "compiling"}), flush=True)
            signal.raise_signal(signal.SIGSTOP)
            return whole(task)

        setattr(Compile, "compile", stopped)  # noqa: B010 - as a name, not as a method
    made = compile_here(folder)
    out = made(jax.tree.map(jnp.asarray, values()[0]), jnp.asarray(values()[1]))
    print(json.dumps({"saw": "made", "source": made.source, "digest": made.digest, "bits": flat(out).hex()}))


if __name__ == "__main__":
    main()
