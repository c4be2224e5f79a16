"""Hugging Face repositories of Llama, Qwen2 and Qwen3 models: their config and weights, in and out.

The weights go through `holdfast.load_hub` and `save_hub` by the mapping in `hub_names`; what is added here is
that `config.json` and the decoder's settings agree.
"""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any, Final

import msgspec

from holdfast.checkpoint.hub import export_hub, load_hub, read_json, save_hub
from holdfast.checkpoint.hub.exporting import SHARD_BYTES
from holdfast.errors import UsageError
from holdfast.train.model.config import ModelConfig
from holdfast.train.model.hub_config import LAYER, hub_config, model_config
from holdfast.train.model.hub_names import decoder_map

CONFIG: Final = "config.json"

_OWN: Final = ("init_std", "param_dtype", "compute_dtype", "attention", "remat", "weight_grads", "layers")
"""Settings that a repository says nothing of."""

Place = str | os.PathLike[str]


def read_model(place: Place, **settings: Any) -> ModelConfig:
    """The model of a repository; `settings`: fields that its config.json says nothing of, as `compute_dtype`.

    Fails: UsageError for a model that is not built, FormatError for a file that is not readable.
    """
    return model_config(read_json(place, CONFIG), **settings)


def read_params(place: Place, config: ModelConfig, into: Any = None) -> Any:
    """The parameters of a repository for `config`, in its `param_dtype`, where the leaves of `into` lie.

    `into` is a tree of the parameters or of their descriptions; None: on the default device. Fails:
    MismatchError, before any is read, with every tensor that is missing, strange or of another shape.
    """
    template = config.build().shapes() if into is None else into
    return load_hub(place, template, decoder_map(config), cast=True)


def write_model(
    place: Place,
    config: ModelConfig,
    params: Any,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a repository that `transformers` loads. `dtype`: what values are cast to; None: as they are.

    Fails: UsageError for a model that is no Llama or Qwen, or for a folder that is not empty.
    """
    text = _config_json(config, dtype)
    save_hub(place, params, decoder_map(config), dtype=dtype, shard_bytes=shard_bytes, files={CONFIG: text})


def export_model(
    place: Place,
    checkpoint: Place,
    config: ModelConfig,
    *,
    step: int | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Any = None,
) -> int:
    """Write the parameters of a run's checkpoint as a repository; returns the step. Fails: as write_model."""
    return export_hub(
        place,
        checkpoint,
        decoder_map(config),
        step=step,
        part="params",
        dtype=dtype,
        shard_bytes=shard_bytes,
        files={CONFIG: _config_json(config, dtype)},
        progress=progress,
    )


def check_weights(place: Place, config: ModelConfig) -> None:
    """Nothing, if a repository is of the model that is configured. Reads headers alone.

    Fails: UsageError with each setting that differs, and the one that would fit; FormatError.
    """
    found = read_model(place)
    wrong = [
        f"model.{one.name}={_written(theirs)}"
        for one in fields(ModelConfig)
        if one.name not in (*_OWN, "loss_chunk")
        and (theirs := _meant(found, one.name)) != _meant(config, one.name)
    ]
    if wrong:
        raise UsageError(
            f"the weights in {os.fspath(place)} are of another model than the recipe's",
            hint=f"start with {' '.join(wrong)}",
        )


def _meant(config: ModelConfig, name: str) -> Any:
    """A setting as it works, not as it is written: a head's width may be given or follow."""
    if name == "pattern":  # its repeats are told by `repeats`: the same layers can be written in many ways
        return LAYER if config.symbols == LAYER * (len(config.symbols) // len(LAYER)) else config.symbols
    if name == "repeats":
        return len(config.symbols) // len(LAYER)
    return {"num_kv_heads": config.kv_heads, "head_dim": config.head_size}.get(name, getattr(config, name))


def _written(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _config_json(config: ModelConfig, dtype: str | None) -> bytes:
    text = hub_config(config, dtype or config.param_dtype)
    return msgspec.json.format(msgspec.json.encode(text), indent=1)
