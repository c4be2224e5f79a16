"""Which tensors of a Hugging Face repository make up each parameter of a decoder: the rules of its mapping.

Their linear layers are [out, in] and separate; here the input leads, and queries, keys and values of each
group of heads lie side by side. Everything is a reordering, so values go both ways bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from holdfast.checkpoint.hub import NameMap, Rule
from holdfast.train.model.config import ModelConfig
from holdfast.train.model.pattern import ATTENTION

_TURNED = "o i -> i o"


def decoder_map(config: ModelConfig) -> NameMap:
    """The mapping for the parameters of a model, unrolled or scanned."""
    rules = [Rule("embed", "model.embed_tokens.weight"), Rule("norm", "model.norm.weight")]
    # Old repositories store the rotary frequencies; some of tied models the head all the same.
    ignore = ["*.rotary_emb.inv_freq"]
    if config.tied:
        ignore.append("lm_head.weight")
    else:
        rules.append(Rule("head", "lm_head.weight"))
    if config.layers == "unrolled":
        for at, symbol in enumerate(config.symbols):
            rules += _block(config, symbol, f"layers/{at}/", f"model.layers.{at // 2}.", {})
        return NameMap(rules, ignore=ignore)
    step = len(config.pattern)
    for at, symbol in enumerate(config.pattern):
        layers = tuple((unit * step + at) // 2 for unit in range(config.repeats))
        rules += _block(config, symbol, f"layers/{at}/", "model.layers.{layer}.", {"layer": layers})
    return NameMap(rules, ignore=ignore)


def _block(
    config: ModelConfig, symbol: str, leaf: str, layer: str, numbers: Mapping[str, Sequence[int]]
) -> Iterator[Rule]:
    """The rules of one residual block, or of all that are stacked in it."""

    def turned(pattern: str) -> str:
        return pattern.replace("->", "-> layer", 1) if numbers else pattern

    if symbol != ATTENTION:
        yield Rule(f"{leaf}norm", f"{layer}post_attention_layernorm.weight", numbers=numbers)
        for name in ("gate", "up", "down"):
            yield Rule(f"{leaf}{name}", f"{layer}mlp.{name}_proj.weight", turned(_TURNED), numbers=numbers)
        return
    kv, group = config.kv_heads, config.num_heads // config.kv_heads
    three = [f"{layer}self_attn.{name}_proj." for name in "qkv"]
    yield Rule(f"{leaf}norm", f"{layer}input_layernorm.weight", numbers=numbers)
    yield Rule(
        f"{leaf}qkv",
        [f"{name}weight" for name in three],
        turned("(kv g d) h -> h kv g d"),
        join="g",
        parts=(group, 1, 1),
        sizes={"kv": kv, "d": config.head_size},
        numbers=numbers,
    )
    yield Rule(
        f"{leaf}out",
        f"{layer}self_attn.o_proj.weight",
        turned("h (heads d) -> heads d h"),
        sizes={"heads": config.num_heads, "d": config.head_size},
        numbers=numbers,
    )
    if config.qkv_bias:
        yield Rule(
            f"{leaf}qkv_bias",
            [f"{name}bias" for name in three],
            turned("(kv g d) -> kv g d"),
            join="g",
            parts=(group, 1, 1),
            sizes={"kv": kv, "d": config.head_size},
            numbers=numbers,
        )
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield Rule(f"{leaf}{name}", f"{layer}self_attn.{name}.weight", numbers=numbers)
