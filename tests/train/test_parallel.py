"""Every way to share a step between devices computes what one device does, and moves what it says it moves.

The programs are those that a run compiles (`Steps.fused`), on eight virtual devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from holdfast.checkpoint import Checkpointer
from holdfast.train.batches import BatchConfig
from holdfast.train.config import TrainConfig
from holdfast.train.data import DataConfig
from holdfast.train.mesh import MeshConfig
from holdfast.train.rates import RateConfig
from holdfast.train.step import Steps
from tests.train.model.small import batch, small

SAMPLES, LENGTH, STEPS = 8, 8, 3
TOLERANCE = 1e-5
"""Relative, of each step's loss and gradient norm, in float32: sums are made in other orders."""

CHOICES: dict[str, tuple[Any, ...]] = {
    "data": (1, 2, 4),
    "fsdp": (1, 2, 4),
    "tensor": (1, 2, 4),
    "zero": (1, 2, 3),
    "sequence_parallel": (True, False),
    "layers": ("unrolled", "scanned"),
}
Row = tuple[Any, ...]
# Each pair of choices that fits on eight devices is in one of these.
COVER: tuple[Row, ...] = (
    (2, 2, 2, 3, False, "scanned"),
    (2, 1, 1, 2, True, "unrolled"),
    (1, 2, 4, 1, True, "scanned"),
    (1, 4, 1, 3, False, "unrolled"),
    (4, 1, 2, 1, False, "unrolled"),
    (4, 2, 1, 2, True, "scanned"),
    (1, 4, 2, 2, True, "scanned"),
    (2, 1, 4, 2, False, "unrolled"),
    (1, 1, 4, 3, True, "scanned"),
    (2, 4, 1, 1, False, "scanned"),
    (4, 2, 1, 3, False, "unrolled"),
)
ALONE: Row = (1, 1, 1, 3, True, "unrolled")


def fits(row: Row) -> bool:
    return int(row[0] * row[1] * row[2]) <= 8


def name(row: Row) -> str:
    data, fsdp, tensor, zero, sequence, layers = row
    return f"data{data} fsdp{fsdp} tensor{tensor} zero{zero} {'sp' if sequence else 'no sp'} {layers}"


@dataclass(frozen=True)
class Outcome:
    """What a mesh computed, and the program that did."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    hlo: str
    params: Any


def program(row: Row, **model: Any) -> Steps:
    mesh = MeshConfig(**dict(zip(list(CHOICES)[:5], row, strict=False)))
    config = TrainConfig(
        name="parallel",
        seq_len=LENGTH,
        samples=SAMPLES * STEPS,
        model=small(layers=row[5], **model),
        data=DataConfig(),
        batch=BatchConfig(schedule=str(SAMPLES), unit="samples", lanes=0, micro=0),
        rate=RateConfig(peak=1e-2),
        mesh=mesh,
    )
    layout = mesh.build(jax.devices()[: mesh.num_devices])
    return Steps(config, config.model.build(), layout, config.optimizer.build(), separate=True)


@cache
def beginning() -> Any:
    """The state before the first step, on the host. All meshes start from it."""
    return jax.device_get(program(ALONE).init(jax.random.key(0)))


def restacked(tree: Any) -> Any:
    """What unrolled layers hold, as scanned ones hold it; the model has one unit."""
    if isinstance(tree, dict) and "layers" in tree:
        return {**tree, "layers": jax.tree.map(lambda one: one[None], tree["layers"])}
    return tree


@cache
def prepared(row: Row) -> tuple[Steps, Any]:
    steps = program(row)
    return steps, steps.fused.lower(*steps.examples(SAMPLES)["fused"]).compile()


def run(row: Row) -> Outcome:
    steps, compiled = prepared(row)
    state = beginning()
    if row[5] == "scanned":
        state = jax.tree.map(restacked, state, is_leaf=lambda one: isinstance(one, dict) and "layers" in one)
    state = jax.device_put(state, steps.shardings, may_alias=False)
    losses, norms = [], []
    for step in range(STEPS):
        micro = steps.put(batch(SAMPLES, LENGTH, seed=step), SAMPLES)
        state, metrics = compiled(state, micro, np.float32(1e-2), np.float32(0.1))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    return Outcome(tuple(losses), tuple(norms), compiled.as_text() or "", state["params"])


outcome = cache(run)


def pairs(row: Row) -> Iterator[tuple[Any, ...]]:
    for one, other in combinations(range(len(row)), 2):
        yield one, row[one], other, row[other]


def every_row() -> list[Row]:
    return [row for row in product(*CHOICES.values()) if fits(row)]


def test_the_cover_has_every_pair() -> None:
    assert len(COVER) <= 12
    assert all(fits(row) for row in COVER)
    wanted = {pair for row in every_row() for pair in pairs(row)}
    missing = wanted - {pair for row in COVER for pair in pairs(row)}
    assert not missing, sorted(missing, key=str)


def test_a_state_is_brought_into_its_description(tmp_path: Path) -> None:
    """The same bits on the same devices as the arrays that a run makes at its beginning."""
    steps = program((1, 4, 2, 2, True, "scanned"))
    made = steps.init(jax.random.key(0))
    with Checkpointer(tmp_path, writer="thread", rank=0, world=1, journal=False) as ckpt:
        ckpt.save(1, made).durable(60.0)
        loaded = ckpt.load(into=steps.described, step=1)
    assert str(jax.tree.structure(loaded)) == str(jax.tree.structure(made))
    split = 0
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(loaded), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
        assert np.array_equal(one, other)
        split += not one.sharding.is_fully_replicated
    assert split


@pytest.mark.parametrize("row", COVER, ids=name)
def test_a_mesh_computes_what_one_device_does(row: Row) -> None:
    check(row)


def check(row: Row) -> None:
    found, want = outcome(row), outcome(ALONE)
    np.testing.assert_allclose(found.losses, want.losses, rtol=TOLERANCE)
    np.testing.assert_allclose(found.norms, want.norms, rtol=TOLERANCE)
    assert len(set(found.losses)) == STEPS  # the parameters did move


def others() -> list[Row]:
    """Every other mesh; where an axis has one device, what else is said of it changes nothing."""
    wide = {**CHOICES, "data": (1, 2, 4, 8), "fsdp": (1, 2, 4, 8)}
    return [
        row
        for row in product(*wide.values())
        if fits(row)
        and row not in COVER
        and row[5] == "unrolled"
        and (row[1] > 1 or row[3] == 3)
        and (row[2] > 1 or row[4])
    ]


@pytest.mark.full
@pytest.mark.parametrize("row", others(), ids=name)
def test_every_other_mesh_computes_what_one_device_does(row: Row) -> None:
    check(row)


# ---- what is moved


def collectives(hlo: str) -> list[tuple[str, str]]:
    """Each collective of a program with its result: `("all-gather", "f32[32,40]")`."""
    found = re.findall(r"= (\([^)]*\)|\S+) (all-gather|all-reduce|reduce-scatter)(?:-start)?\(", hlo)
    return [(kind, re.sub(r"\{[^}]*\}|/\*.*?\*/", "", result)) for result, kind in found]


def gathered(hlo: str, shape: str) -> int:
    return sum(shape in result for kind, result in collectives(hlo) if kind == "all-gather")


def summed(hlo: str, shape: str) -> int:
    return sum(result.count(shape) for kind, result in collectives(hlo) if kind == "all-reduce")


def ends(hlo: str) -> tuple[str, str]:
    """Shapes that go in and come out, as each device has them."""
    inputs, _, outputs = hlo.partition("entry_computation_layout={(")[2].partition("\n")[0].partition(")->")
    return inputs, outputs


@pytest.mark.parametrize(("remat", "times"), [("none", 2), ("light", 2), ("full", 3)])
def test_the_stream_is_gathered_in_the_compute_dtype(remat: str, times: int) -> None:
    """What a block multiplies rests in its shards first: else XLA gathers float32 values of its norm."""
    steps = program((1, 1, 2, 3, True, "unrolled"), compute_dtype="bfloat16", remat=remat)
    text = steps.first.lower(*steps.examples(SAMPLES)["first"]).as_text()
    stream = rf"tensor<{SAMPLES}x{LENGTH}x32xbf16>"
    said = rf"(%\w+) = sdy\.sharding_constraint (%\w+) <@mesh, (.*)> : {stream}"
    rests, gathers = set(), []
    for made, of, split in re.findall(said, text):
        if split == '[{}, {"tensor"}, {}]':
            rests.add(made)
        elif split == "[{}, {}, {}]":
            gathers.append(of in rests)
    # For the products that open the two blocks, in both passes; `full` makes the first pass once more.
    assert sum(gathers) == 2 * times


WHOLE, SHARE = "f32[32,40]", "f32[8,40]"
"""The gate and up projections, and a quarter of one."""
QKV = "f32[32,4,4,4]"
"""What queries, keys and values are made by."""


def compiled(which: str, zero: int) -> str:
    steps = program((1, 4, 1, zero, True, "unrolled"))
    return getattr(steps, which).lower(*steps.examples(SAMPLES)[which]).compile().as_text() or ""


def test_zero_1_and_2_differ_in_the_gradients_and_gather_no_weight_before_the_update() -> None:
    for zero in (1, 2):
        hlo = compiled("first", zero)
        inputs, outputs = ends(hlo)
        assert WHOLE in inputs
        assert SHARE not in inputs
        assert gathered(hlo, WHOLE) == 0
        assert summed(hlo, WHOLE) == 2
        # The gradients that come out: whole, or each device's share of the sum.
        assert outputs.count(WHOLE) == (2 if zero == 1 else 0)
        assert outputs.count(SHARE) == (0 if zero == 1 else 2)
        # CPUs leave the sum and the cut apart, but for the table, which asks for both at once.
        scatters = [result for kind, result in collectives(hlo) if kind == "reduce-scatter"]
        assert scatters == ([] if zero == 1 else ["f32[48,8]"])


def test_zero_2_gathers_each_weight_once_after_the_update() -> None:
    hlo = compiled("apply", 2)
    inputs, outputs = ends(hlo)
    # In: two weights, and of each two moments and the gradient. Out: the same less the gradients.
    assert (inputs.count(WHOLE), inputs.count(SHARE)) == (2, 6)
    assert (outputs.count(WHOLE), outputs.count(SHARE)) == (2, 4)
    assert gathered(hlo, WHOLE) == 2


def test_zero_3_gathers_each_weight_before_each_use_and_never_after_the_update() -> None:
    hlo = outcome((1, 4, 1, 3, False, "unrolled")).hlo
    inputs, outputs = ends(hlo)
    assert WHOLE not in inputs
    assert WHOLE not in outputs
    assert inputs.count(SHARE) == outputs.count(SHARE) == 6
    # Gate and up, in the forward and in the backward pass; queries, keys and values are gathered as one.
    assert gathered(hlo, WHOLE) == 4
    assert gathered(hlo, QKV) == 2


def test_sequence_parallelism_gathers_the_stream_where_it_is_multiplied() -> None:
    split = outcome((1, 1, 4, 3, True, "scanned")).hlo
    whole = outcome((2, 1, 4, 2, False, "unrolled")).hlo
    assert gathered(split, "f32[8,8,32]") > 0
    assert "f32[8,2,32]" in split  # between the blocks: a quarter of the sequence
    assert gathered(whole, "f32[4,8,32]") == 0
    assert summed(whole, "f32[4,8,32]") > 0


def test_a_mesh_gives_the_same_bits_every_time() -> None:
    row = (2, 2, 2, 3, False, "scanned")
    first, again = outcome(row), run(row)
    assert first.losses == again.losses
    jax.tree.map(np.testing.assert_array_equal, first.params, again.params)


def test_a_run_begins_with_the_same_values_on_every_mesh() -> None:
    state = program((2, 2, 2, 3, True, "unrolled")).init(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, state, beginning())
