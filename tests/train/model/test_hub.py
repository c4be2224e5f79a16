"""Hugging Face repositories: logits as `transformers` gives them, and the way back bit for bit.

`golden/` has tiny models with the logits of `transformers`, and the script that made them.
"""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from holdfast.errors import FormatError, MismatchError, UsageError
from holdfast.train.model.hub import read_model, read_params, write_model
from tests.train.model.small import small

GOLDEN = Path(__file__).parent / "golden"
MODELS = ("llama", "qwen2", "qwen3")


@pytest.mark.parametrize(("name", "layers"), [*product(MODELS, ["unrolled"]), ("qwen2", "scanned")])
def test_logits_are_those_of_transformers(name: str, layers: str) -> None:
    # float32 on both sides; logits are up to about 10, and sums are made in other orders.
    folder = GOLDEN / name
    config = read_model(folder, compute_dtype="float32", layers=layers)
    params = read_params(folder, config)
    tokens = np.load(folder / "tokens.npy")
    logits = jax.jit(config.build().apply)(params, tokens)
    np.testing.assert_allclose(logits, np.load(folder / "logits.npy"), rtol=0, atol=2e-5)


def tensors(folder: Path) -> dict[str, Any]:
    return {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}


@pytest.mark.parametrize("layers", ["unrolled", "scanned"])
@pytest.mark.parametrize(
    ("name", "dtype", "shard"),
    [("llama", None, 1 << 20), ("qwen2", "bfloat16", 9000), ("qwen3", "float32", 40_000)],
)
def test_what_is_read_is_written_bit_for_bit(
    name: str, dtype: str | None, shard: int, layers: str, tmp_path: Path
) -> None:
    config = read_model(GOLDEN / name, layers=layers)
    params = jax.tree.map(jax.numpy.asarray, read_params(GOLDEN / name, config))
    out = tmp_path / "out"
    write_model(out, config, params, dtype=dtype, shard_bytes=shard)
    assert read_model(out, layers=layers) == config
    ours, theirs = tensors(out), tensors(GOLDEN / name)
    assert sorted(ours) == sorted(theirs)
    for one in theirs:
        assert ours[one].dtype == theirs[one].dtype
        assert ours[one].tobytes() == theirs[one].tobytes()
        assert ours[one].shape == theirs[one].shape
    assert len(list(out.glob("*.safetensors"))) == (1 if name == "llama" else 4 if name == "qwen2" else 3)
    if name != "llama":
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert sorted(index["weight_map"]) == sorted(theirs)


def test_parameters_lie_where_the_template_says() -> None:
    config = read_model(GOLDEN / "llama")
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

    def described(one: Any) -> Any:
        spec = PartitionSpec(*[None] * (one.ndim - 1), "x")  # type: ignore[no-untyped-call]
        return jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=NamedSharding(mesh, spec))  # type: ignore[no-untyped-call]

    template = jax.tree.map(described, config.build().shapes())
    params, alone = read_params(GOLDEN / "llama", config, template), read_params(GOLDEN / "llama", config)
    ours: Any = jax.tree.structure(params)
    assert ours == jax.tree.structure(config.build().shapes())
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(alone), strict=True):
        assert len(one.sharding.device_set) == 2
        assert not one.is_fully_replicated
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def copied(tmp_path: Path, **changes: Any) -> Path:
    """The golden Llama with other entries in its config.json."""
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "llama", folder)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**text, **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt2"}, "'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn'"),
    ],
)
def test_a_model_that_is_not_built_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        read_model(copied(tmp_path, **changes))


def test_weights_of_another_model_are_refused_with_every_tensor(tmp_path: Path) -> None:
    folder = copied(tmp_path, intermediate_size=44, num_hidden_layers=3, tie_word_embeddings=True)
    config = read_model(folder)
    with pytest.raises(MismatchError) as caught:
        read_params(folder, config)
    told = str(caught.value)
    assert "model.layers.0.mlp.up_proj.weight has the shape [40, 32], [44, 32] wanted" in told
    assert "model.layers.2.self_attn.q_proj.weight is missing" in told
    assert "lm_head" not in told  # tied models often store it


def test_damaged_repositories_are_refused(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    config = read_model(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(FormatError, match="truncated"):
        read_params(folder, config)
    file.unlink()
    with pytest.raises(UsageError, match="neither"):
        read_params(folder, config)
    index = folder / "model.safetensors.index.json"
    for name, says in (("../../other", "not in its folder"), ("gone.safetensors", "not there")):
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        with pytest.raises(FormatError, match=says):
            read_params(folder, config)
    (folder / "config.json").write_text("{")
    with pytest.raises(FormatError, match="not JSON"):
        read_model(folder)


def test_what_is_no_llama_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither Llama nor Qwen"):
        write_model(tmp_path, small(pattern="**-"), {})
    with pytest.raises(UsageError, match="both"):
        write_model(tmp_path, small(qk_norm=True, qkv_bias=True), {})
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="empty folder"):
        write_model(tmp_path, small(), {})
