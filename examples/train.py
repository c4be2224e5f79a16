# mypy: allow-untyped-calls, no-warn-return-any
"""A small language model that saves while it trains and resumes on 2, 4 or 8 devices, to the same bits.

    python examples/train.py --ckpt runs/tiny/ckpt --devices 4      # kill it whenever you like,
    python examples/train.py --ckpt runs/tiny/ckpt --devices 2      # and go on where the last save was

Why the bits do not depend on the number of devices:
- Data order is a pure function of (seed, samples): what lane 3 of step 17 reads depends on nothing else.
- The batch is always 8 lanes. A lane is computed alone, with the same shapes, whichever device runs it.
- Every device gets its slice of all 8 gradients and adds them in one fixed binary tree (a `psum` would first
  add what happens to lie on one device). Adam then works element by element on that slice.
Needed besides: the same kind of machine and number of threads, since a matmul may add in another order
elsewhere; and more than one device, because XLA fuses a program for one device differently.
"""

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import holdfast

VOCAB, WIDTH, HEADS, LAYERS, LENGTH, LANES, LANE_SIZE = 256, 256, 4, 2, 32, 8, 2
BATCH, ADAM = LANES * LANE_SIZE, optax.adam(3e-3)


def init(seed: int) -> dict[str, Any]:
    """The first state. The paths of its leaves are the names of the arrays on disk."""
    keys = iter(jax.random.split(jax.random.key(seed), 1 + 4 * LAYERS))
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 512), "down": (512, WIDTH)}
    weight = partial(jax.nn.initializers.normal(0.05), dtype=jnp.float32)
    layers = [{name: weight(next(keys), shape) for name, shape in shapes.items()} for _ in range(LAYERS)]
    params = {"embed": weight(next(keys), (VOCAB, WIDTH)), "layers": layers}
    return {"params": params, "opt": ADAM.init(params)}


def sample(seed: int, index: jax.Array) -> jax.Array:
    """Sequence number `index` of an endless synthetic text: an arithmetic progression with noise."""
    key = jax.random.fold_in(jax.random.key(seed), index)
    start, stride, noise = jax.random.randint(key, (3,), 0, VOCAB)
    at = jnp.arange(LENGTH + 1)
    return (start + (stride % 8 + 1) * at + (at % 7 == noise % 7)) % VOCAB


def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
    """Mean next-token loss of a causal transformer."""
    norm = partial(jax.nn.standardize, axis=-1)
    x = params["embed"][tokens[:, :-1]]
    for layer in params["layers"]:
        q, k, v = jnp.split((norm(x) @ layer["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
        x += jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ layer["out"]
        x += jax.nn.relu(norm(x) @ layer["up"]) @ layer["down"]
    return optax.softmax_cross_entropy_with_integer_labels(norm(x) @ params["embed"].T, tokens[:, 1:]).mean()


def tree_mean(lanes: jax.Array) -> jax.Array:
    """The mean over the first dim, always added as ((0+1)+(2+3))+((4+5)+(6+7))."""
    while len(lanes) > 1:
        lanes = lanes[0::2] + lanes[1::2]
    return lanes[0] / LANES


def device_step(seed: int, state: dict[str, Any], samples: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    """What each device does with its slice of the state; `samples` were consumed before this step."""
    mine = LANES // jax.lax.axis_size("fsdp")
    whole = jax.tree.map(lambda w: jax.lax.all_gather(w, "fsdp", tiled=True), state["params"])

    def lane(number: jax.Array) -> tuple[jax.Array, Any]:
        first = samples + (jax.lax.axis_index("fsdp") * mine + number) * LANE_SIZE
        tokens = jax.vmap(partial(sample, seed))(first + jnp.arange(LANE_SIZE))
        return jax.value_and_grad(loss_of)(whole, tokens)

    losses, grads = jax.lax.map(lane, jnp.arange(mine))
    # From (my lanes, whole array) to (all lanes, my slice of the array).
    grads = jax.tree.map(lambda g: tree_mean(jax.lax.all_to_all(g, "fsdp", 1, 0, tiled=True)), grads)
    updates, opt = ADAM.update(grads, state["opt"])
    losses = jax.lax.all_gather(losses, "fsdp", tiled=True)
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, tree_mean(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model; resumes by itself.")
    parser.add_argument("--ckpt", required=True)
    parser.add_argument("--devices", type=int, default=4, choices=(2, 4, 8))
    for name, default in {"steps": 40, "save-every": 8, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.devices)
    mesh = jax.make_mesh((args.devices,), ("fsdp",), axis_types=(AxisType.Auto,))
    # Every array is cut along its first dim; Adam's count is replicated. Nothing is allocated yet.
    start, body = partial(init, args.seed), partial(device_step, args.seed)
    shapes = jax.eval_shape(start)
    specs = jax.tree.map(lambda leaf: PartitionSpec("fsdp") if leaf.ndim else PartitionSpec(), shapes)
    shardings = jax.tree.map(partial(NamedSharding, mesh), specs)
    template = jax.tree.map(lambda t, s: t.update(sharding=s), shapes, shardings)
    io = (specs, PartitionSpec())
    on_mesh = jax.shard_map(body, mesh=mesh, in_specs=io, out_specs=io, check_vma=False)
    fresh, train_step = jax.jit(start, out_shardings=shardings), jax.jit(on_mesh, donate_argnums=0)
    with holdfast.Checkpointer(args.ckpt, keep=3) as ckpt:
        state = ckpt.load(into=template | {"samples": 0}, init=lambda: fresh() | {"samples": 0})
        samples = state.pop("samples")
        ckpt.prepare(state | {"samples": samples})  # vault and memory, so that the first save is quick too
        print(f"starting at step {samples // BATCH} on {args.devices} devices", flush=True)
        for step in range(samples // BATCH + 1, args.steps + 1):
            state, loss = train_step(state, samples)
            samples += BATCH
            line = f"step {step:4}  loss {float(loss):.6f}  bits {jax.device_get(loss).tobytes().hex()}"
            if step % args.save_every == 0 or step == args.steps:
                ckpt.save(step, state | {"samples": samples}, meta={"samples": samples, "loss": float(loss)})
                line += "  saving"
            print(line, flush=True)


if __name__ == "__main__":
    main()
