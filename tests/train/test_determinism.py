"""Deterministic programs on GPUs, as far as they can be looked at without one."""

from __future__ import annotations

import inspect
import json

import pytest

from holdfast.train.determinism import compiler_options, deterministic_config

attention = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")


def test_the_private_function_is_as_expected() -> None:
    made = inspect.unwrap(attention.create_dot_product_attention_backend_config)
    assert list(inspect.signature(made).parameters)[-1] == "is_bwd"


def test_the_mark_is_set() -> None:
    marked = deterministic_config(lambda: json.dumps({"cudnn_fmha_backend_config": {"seed": 3}}))
    assert json.loads(marked()) == {"cudnn_fmha_backend_config": {"seed": 3, "force_deterministic": True}}


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_nothing_is_said_where_nothing_is_to_be_left_out(platform: str) -> None:
    assert compiler_options(platform, deterministic=True) == {}


def test_a_gpu_keeps_its_fastest_kernels_where_that_is_asked_for() -> None:
    assert "xla_gpu_exclude_nondeterministic_ops" not in compiler_options("gpu", deterministic=False)


def test_a_gpu_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "create_dot_product_attention_backend_config"
    monkeypatch.setattr(attention, name, inspect.unwrap(getattr(attention, name)))
    for _ in range(2):
        assert compiler_options("gpu", deterministic=True)["xla_gpu_exclude_nondeterministic_ops"]
    assert not hasattr(getattr(attention, name).__wrapped__, "__wrapped__")
