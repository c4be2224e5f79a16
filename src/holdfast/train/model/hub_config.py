"""`config.json` of Hugging Face's Llama, Qwen2 and Qwen3 as a ModelConfig, and back.

What the decoder does not build (another activation, sliding windows, other rotary scalings) is refused by
name: weights that load into the wrong function give plausible nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from holdfast.errors import UsageError
from holdfast.train.model.config import ModelConfig, RopeScaling

LAYER: Final = "*-"
"""A layer of these models: attention, then MLP."""

_CLASSES: Final = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def model_config(found: Mapping[str, Any], **settings: Any) -> ModelConfig:
    """The model that a `config.json` describes; `settings` are those that it says nothing of, as `remat`.

    Fails: UsageError with everything about it that the decoder does not build.
    """
    kind = found.get("model_type")
    if kind not in _CLASSES:
        raise UsageError(
            f"config.json describes a model of type {kind!r}", hint=f"these are read: {', '.join(_CLASSES)}"
        )
    _refuse_strange(found)
    rope = {**found, **(found.get("rope_parameters") or {})}
    num_layers, heads = found["num_hidden_layers"], found["num_attention_heads"]
    return ModelConfig(
        pattern=LAYER,
        repeats=num_layers,
        vocab_size=found["vocab_size"],
        hidden=found["hidden_size"],
        num_heads=heads,
        num_kv_heads=found.get("num_key_value_heads") or heads,
        head_dim=found.get("head_dim") or (128 if kind == "qwen3" else None),
        mlp_hidden=found["intermediate_size"],
        rope_theta=float(rope.get("rope_theta") or 10_000.0),
        rope_scaling=_scaling(found.get("rope_parameters") or found.get("rope_scaling") or {}),
        norm_eps=found.get("rms_norm_eps", 1e-6),
        tied=bool(found.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        **settings,
    )


def _refuse_strange(found: Mapping[str, Any]) -> None:
    wrong = [
        f"{name} is {found[name]!r}"
        for name, known in (
            ("hidden_act", ("silu",)),
            ("attention_bias", (False,)),
            ("mlp_bias", (False,)),
            ("use_sliding_window", (False,)),
            ("quantization_config", (None,)),
        )
        if name in found and found[name] not in known
    ]
    if wrong:
        raise UsageError(
            f"config.json describes a model that is not built: {', '.join(wrong)}",
            hint="plain Llama, Qwen2 and Qwen3 models are read",
        )


def _scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise UsageError(f"config.json scales rotary embeddings by {kind!r}", hint="'llama3' is built")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_positions=int(rope["original_max_position_embeddings"]),
    )


def hub_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The `config.json` of a model. Fails: UsageError if none of the three kinds has its layers."""
    if config.symbols != LAYER * (len(config.symbols) // 2):
        raise UsageError(
            f"a model with the layers {config.symbols!r} is neither Llama nor Qwen",
            hint=f"only layers of {LAYER!r} can be exported",
        )
    if config.qk_norm and config.qkv_bias:
        raise UsageError("no Llama or Qwen has both qk_norm and qkv_bias", hint="keep it as a checkpoint")
    kind = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    scaling = config.rope_scaling
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_positions,
        }
    head = {} if config.head_dim is None else {"head_dim": config.head_dim}
    return {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "intermediate_size": config.mlp_hidden,
        "num_hidden_layers": len(config.symbols) // 2,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        **head,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        # Both spellings: transformers from 5 on reads the first, those before it the others.
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else rope,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
