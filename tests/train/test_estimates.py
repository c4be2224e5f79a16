"""Closed forms beside what XLA says of the compiled programs: within 10 %, over a grid of configs."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from holdfast.train.compiler import Finding

TOLERANCE = 0.10
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}

FAST = [
    ("recipes.tiny", ""),
    ("recipes.one_world", "model.num_kv_heads=2;model.repeats=2;batch.schedule=4"),
]
BIG = (
    "model.hidden=256;model.head_dim=64;model.mlp_hidden=768;model.vocab_size=2048;seq_len=256;batch.micro=2"
)
FULL = [
    *(
        ("recipes.small", f"model.remat={remat};model.compute_dtype={dtype};model.layers={layers}")
        for remat, dtype, layers in [
            ("none", "float32", "unrolled"),
            ("full", "float32", "unrolled"),
            ("light", "bfloat16", "unrolled"),
            ("light", "float32", "scanned"),
        ]
    ),
    ("recipes.tiny", BIG),
    ("recipes.tiny", f"{BIG};model.remat=full;model.repeats=2"),
    ("recipes.tiny", f"{BIG};model.remat=none;model.repeats=2"),
    ("recipes.tiny", "seq_len=512;batch.micro=1;model.repeats=2"),
    ("recipes.tiny", "model.num_heads=8;model.num_kv_heads=8;model.head_dim=16;model.repeats=2"),
    ("recipes.tiny", "model.mlp_hidden=768;model.repeats=3"),
    ("recipes.tiny", "model.tied=false;model.vocab_size=2048;model.repeats=2"),
    ("recipes.tiny", "mesh.data=2;model.repeats=2"),
    ("recipes.tiny", "mesh.fsdp=2;model.repeats=2"),
    ("recipes.tiny", "mesh.fsdp=4;model.repeats=2;batch.schedule=128;batch.micro=16"),
    ("recipes.tiny", "mesh.fsdp=2;mesh.zero=1;model.repeats=2"),
    ("recipes.tiny", "mesh.fsdp=2;mesh.zero=2;model.repeats=2"),
    ("recipes.one_world", f"{BIG};batch.schedule=4;batch.micro=4;mesh.fsdp=2"),
]
TENSOR = [
    ("recipes.tiny", "mesh.tensor=2;model.repeats=2"),
    ("recipes.tiny", "mesh.tensor=2;mesh.fsdp=2;model.repeats=2"),
    ("recipes.tiny", "mesh.tensor=4;model.repeats=2"),
]


def compiled(configs: list[tuple[str, str]], timeout_s: float) -> list[list[Finding]]:
    words = [word for pair in configs for word in pair]
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.estimates", *words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [msgspec.json.decode(line, type=list[Finding]) for line in done.stdout.splitlines()]


def wrong(configs: list[tuple[str, str]], found: list[list[Finding]], *, memory: bool = True) -> list[str]:
    assert len(found) == len(configs)
    return [
        f"{recipe} {settings}: {one.program} FLOPs {one.flops_error}, bytes {one.bytes_error:+.1%}"
        for (recipe, settings), findings in zip(configs, found, strict=True)
        for one in findings
        if one.flops_error is None
        or abs(one.flops_error) > TOLERANCE
        or (memory and abs(one.bytes_error) > TOLERANCE)
    ]


@pytest.mark.process
def test_estimates_are_near_what_xla_says() -> None:
    found = compiled(FAST, 110)
    assert [[one.program for one in findings] for findings in found] == [
        ["first", "more", "apply"],
        ["fused"],
    ]
    assert wrong(FAST, found) == []


@pytest.mark.process
@pytest.mark.full
@pytest.mark.timeout(1600)
def test_estimates_are_near_what_xla_says_over_the_grid() -> None:
    assert wrong(FULL, compiled(FULL, 1500)) == []


@pytest.mark.process
@pytest.mark.full
@pytest.mark.timeout(800)
def test_operations_are_near_what_xla_says_where_a_sample_is_shared() -> None:
    """Of the tensor axis only operations: XLA's CPU compiler holds whole streams around its collectives."""
    assert wrong(TENSOR, compiled(TENSOR, 700), memory=False) == []
