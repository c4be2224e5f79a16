"""`holdfast sums` plans what a launch can do, and nothing else."""

from __future__ import annotations

import json

import click.testing
import pytest

from holdfast.cli import main


def invoke(*options: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(main, ["sums", "float32=4MB", "--lane-s", "1", *options])


def test_a_wire_dtype_halves_the_bytes() -> None:
    plain, rounded = (
        json.loads(invoke("--json", *more).stdout) for more in ([], ["--wire-dtype", "bfloat16"])
    )
    assert (plain["wire_bytes"], rounded["wire_bytes"]) == (4_000_000, 2_000_000)


@pytest.mark.parametrize("name", ["int8", "float8_e8m0fnu", "bf16"])
def test_a_wire_dtype_that_launch_refuses_is_refused(name: str) -> None:
    result = invoke("--wire-dtype", name)
    assert result.exit_code == 2
    assert f"--wire-dtype {name}: no sums are made in that" in result.output
    assert "hint: use bfloat16, float16, float32" in result.output
