"""Plans: every byte at rest is exact, the smallest replica is the smallest, and numbers add up."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import pytest

from holdfast.recipes import resolve
from holdfast.train.config import TrainConfig
from holdfast.train.devices import TABLE, Device, here, known_names, lookup
from holdfast.train.memory import memory, program_bytes, programs
from holdfast.train.model.config import ModelConfig
from holdfast.train.parameters import parameters
from holdfast.train.planning import plan, smallest_replica
from holdfast.train.step import Steps

H200 = lookup("NVIDIA H200")


def steps_of(config: TrainConfig) -> Steps:
    return Steps(config, config.model.build(), config.mesh.build(), config.optimizer.build())


def held(shapes: Any, shardings: Any, width: int = 0) -> int:
    """Bytes that each device holds, by JAX's own account; `width`: of each number, whatever its dtype."""
    sizes = jax.tree.map(
        lambda one, where: math.prod(where.shard_shape(one.shape)) * (width or one.dtype.itemsize),
        shapes,
        shardings,
    )
    return sum(jax.tree.leaves(sizes))


MODELS = [
    (),
    ("model.num_kv_heads=2", "model.tied=false", "model.qk_norm=true"),
    ("model.qkv_bias=true", "model.layers=scanned", "model.compute_dtype=bfloat16"),
    ("model.param_dtype=bfloat16", "model.pattern=*--", "model.repeats=2"),
]
MESHES = [(1, 1, 1), (2, 1, 1), (1, 4, 1), (1, 1, 2), (2, 2, 2)]


@pytest.mark.parametrize("settings", MODELS, ids=lambda settings: ",".join(settings) or "plain")
def test_the_table_of_parameters_is_that_of_the_model(settings: tuple[str, ...]) -> None:
    model = resolve("recipes.tiny", settings).model
    decoder = model.build()
    shapes, axes = decoder.shapes(), decoder.axes()
    made: dict[str, Any] = {}
    for path, one in jax.tree_util.tree_leaves_with_path(shapes):
        name = "/".join(str(key.key) for key in path)
        logical: Any = axes
        for key in path:
            logical = logical[key.key]
        made[name] = one.shape, logical
    assert {one.name: (one.shape, one.logical) for one in parameters(model)} == made
    assert sum(one.size for one in parameters(model)) == model.num_params


@pytest.mark.parametrize("number", range(len(MESHES)), ids=lambda number: "x".join(map(str, MESHES[number])))
def test_bytes_at_rest_are_exact(number: int) -> None:
    data, fsdp, tensor = MESHES[number]
    for zero in (1, 2, 3):
        given = [f"mesh.data={data}", f"mesh.fsdp={fsdp}", f"mesh.tensor={tensor}", f"mesh.zero={zero}"]
        # Which model goes with which mesh does not matter, as long as each meets several.
        settings = MODELS[(number + zero) % len(MODELS)]
        config = resolve("recipes.tiny", [*settings, *given, "model.repeats=2"])
        steps, ours = steps_of(config), memory(config)
        assert ours.params == held(steps.shapes["params"], steps.shardings["params"])
        counters = 64  # optax counts steps
        assert 0 <= held(steps.shapes["opt"], steps.shardings["opt"]) - ours.optimizer <= counters
        assert ours.sums == held(steps.shapes["params"], steps.sums_shardings["grads"], width=4)


@pytest.mark.parametrize(
    "settings",
    [
        ("batch.lanes=0", "batch.micro=0"),
        ("batch.lanes=0", "batch.micro=0", "model.remat=full"),
        ("batch.lanes=0", "batch.micro=0", "mesh.fsdp=4"),
        ("batch.micro=2",),
        ("batch.micro=2", "model.layers=scanned"),
    ],
    ids=",".join,
)
def test_the_total_is_that_of_the_program_that_takes_most(settings: tuple[str, ...]) -> None:
    config = resolve("recipes.dense_1b", settings)
    ours = memory(config)
    samples = config.batch.micro or 16
    # Moments rest on the device while gradients are made, though they are no argument of that program.
    taken = [
        program_bytes(config, name, samples, "gpu") + (ours.optimizer if name in ("first", "more") else 0)
        for name in programs(config)
    ]
    assert ours.total == pytest.approx(max(taken), rel=0.1)


def test_flat_moments_are_nearly_exact() -> None:
    config = resolve("recipes.tiny", ["mesh.fsdp=4", "optimizer.flat_shards=4", "model.repeats=2"])
    steps = steps_of(config)
    exact = held(steps.shapes["opt"], steps.shardings["opt"])
    assert memory(config).optimizer == pytest.approx(exact, rel=0.01)  # buffers are padded


def test_a_plan_of_a_batch_that_grows() -> None:
    assert H200 is not None
    config = resolve("recipes.small")
    made = plan(config, H200)
    assert [(row.step, row.samples, row.size) for row in made.phases] == [(0, 0, 16), (125, 2000, 32)]
    assert sum(row.num_steps for row in made.phases) == made.total_steps == config.total_steps
    assert made.total_samples == sum(row.num_steps * row.size for row in made.phases)
    assert made.total_flops == pytest.approx(made.flops_per_token * made.total_tokens)
    assert made.phases[1].microbatches == 2
    assert sum(made.params.values()) == made.num_params == config.model.num_params
    assert max(rate for _, rate in made.rate) == config.rate.peak
    assert made.sums_bytes == 4 * made.num_params
    assert made.state_bytes == 12 * made.num_params
    assert plan(resolve("recipes.one_world"), H200).sums_bytes == 0


def test_a_plan_ends_with_the_run_and_not_with_the_schedule() -> None:
    given = ["samples=100", "rate.warmup=10", "batch.schedule=0:32 1B:64"]
    made = plan(resolve("recipes.tiny", given), Device("none"))
    assert [(row.step, row.num_steps) for row in made.phases] == [(0, 4)]
    assert made.smallest is None  # the memory of the device is not known


def big(*settings: str) -> TrainConfig:
    given = ["model.hidden=8192", "model.repeats=80", "model.num_heads=64", "model.num_kv_heads=8"]
    given += ["model.mlp_hidden=28672", "model.vocab_size=128256", "seq_len=8192", "batch.schedule=1024"]
    return resolve("recipes.dense_1b", [*given, *settings])


def test_the_smallest_replica_fits_and_half_of_it_does_not() -> None:
    assert H200 is not None
    config = big()
    small = plan(config, H200).smallest
    assert small is not None
    assert 8 <= small.num_devices <= 64
    assert config.model.num_params * 16 / small.num_devices < small.memory.total <= H200.memory
    halved = lookup("A100-SXM4-80GB")
    assert halved is not None
    more = plan(config, halved).smallest
    assert more is not None
    assert more.num_devices > small.num_devices


@pytest.mark.parametrize(
    "given",
    [
        (),
        ("mesh.data=2", "mesh.tensor=2", "mesh.zero=1"),
        ("evaluation.samples=24", "evaluation.batch=2"),
        ("mesh.fsdp=4", "batch.micro=4", "optimizer.flat_shards=4"),
        ("batch.lanes=0", "batch.micro=0", "batch.schedule=64", "model.remat=full"),
    ],
    ids=lambda given: ",".join(given) or "plain",
)
def test_the_settings_of_the_smallest_replica_give_it(given: tuple[str, ...]) -> None:
    config = big("model.layers=scanned", *given)
    for gigabytes, least in ((30, 128), (80, 32), (10_000, 1)):
        device = Device("imaginary", memory=gigabytes * 10**9)
        small = smallest_replica(config, device)
        assert small is not None
        assert small.num_devices >= least
        changed = config.override(small.settings)
        changed.check()
        assert changed.mesh.num_devices == small.num_devices
        assert memory(changed) == small.memory
        assert changed.evaluation.every == config.evaluation.every
        assert bool(changed.optimizer.flat_shards) == bool(config.optimizer.flat_shards)
        assert smallest_replica(changed, device) == replace(small, settings=())
        # Beyond the 8 samples of an evaluation's batch.
        assert gigabytes != 30 or changed.evaluation.batch == changed.mesh.fsdp >= 16
    assert smallest_replica(config, Device("imaginary", memory=10**7)) is None


@pytest.mark.parametrize(
    ("less", "than"),
    [
        (("mesh.fsdp=8", "batch.micro=8"), ("batch.micro=8",)),
        (("mesh.fsdp=8", "batch.micro=8", "mesh.zero=3"), ("mesh.fsdp=8", "batch.micro=8", "mesh.zero=2")),
        (("mesh.fsdp=8", "batch.micro=8", "mesh.zero=2"), ("mesh.fsdp=8", "batch.micro=8", "mesh.zero=1")),
        (("mesh.tensor=2",), ()),
        (("mesh.tensor=2",), ("mesh.tensor=2", "mesh.sequence_parallel=false")),
        (("model.remat=light",), ("model.remat=none",)),
        (("model.remat=full",), ("model.remat=light",)),
        (("model.loss_chunk=256",), ()),
        (("batch.micro=1",), ("batch.micro=4",)),
        ((), ("model.attention=xla",)),
    ],
)
def test_what_takes_less_memory(less: tuple[str, ...], than: tuple[str, ...]) -> None:
    given = ("evaluation.every=0",)
    assert memory(big(*less, *given)).total < memory(big(*than, *given)).total


def test_only_gpus_have_the_fused_kernel() -> None:
    config = big("evaluation.every=0")
    assert memory(config, "gpu").workspace < memory(config, "tpu").workspace


def test_devices() -> None:
    kinds = {
        "NVIDIA H200": ("H200", 989.5e12),
        "NVIDIA H100 80GB HBM3": ("H100", 989.5e12),
        "NVIDIA H100 PCIe": ("H100 PCIe", 756.5e12),
        "NVIDIA A100-SXM4-40GB": ("A100 40GB", 312e12),
        "NVIDIA GB200": ("GB200", 2500e12),
        "NVIDIA L4": ("L4", 121e12),
        "TPU v5 lite": ("TPU v5e", 197e12),
        "TPU v5p": ("TPU v5p", 459e12),
        "NVIDIA GH200 480GB": ("GH200", 989.5e12),
        "Tesla V100-SXM2-16GB": ("V100 16GB", 0.0),
    }
    for kind, (name, rate) in kinds.items():
        found = lookup(kind)
        assert found is not None
        assert (found.name, found.peak("bfloat16")) == (name, rate)
    for name in known_names():
        found = lookup(name)
        assert found is not None
        assert found.name == name
    for kind in ("Imaginary 9000", "NVIDIA RTX A1000", "NVIDIA RTX A1000 Laptop GPU", "NVIDIA H1000"):
        assert lookup(kind) is None, kind
    for kind in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti", "TPU v4 lite"):
        assert lookup(kind) is None, kind
    assert {device.platform for _, device in TABLE if device.name.startswith("TPU")} == {"tpu"}
    assert {device.platform for _, device in TABLE if not device.name.startswith("TPU")} == {"gpu"}
    assert H200 is not None
    assert H200.peak("int3") == 0.0


def test_an_unknown_device_is_asked() -> None:
    found = here()  # a CPU is not in the table
    assert not found.known
    assert found.memory > 2**28
    assert found.peak("bfloat16") == 0.0

    class Strange:
        device_kind = "Imaginary 9000"
        platform = "imaginary"

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": 123}

    assert here(Strange()).memory == 123


def test_the_model_config_of_the_table_needs_no_jax() -> None:
    assert parameters(ModelConfig(vocab_size=8, hidden=4, num_heads=2, mlp_hidden=8))[0].size == 32
