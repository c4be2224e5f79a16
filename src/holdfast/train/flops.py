"""How many operations a step takes, by two conventions that are kept apart.

*Model* operations are what the mathematics asks for: matrix products forward and backward (twice forward),
the embedding lookup not counted, causal attention as the half that is not masked, and nothing counted twice
for being computed again. It is the numerator of MFU and what Megatron-LM and MaxText report.

*Executed* operations are what the compiled program does: attention over the whole square where the kernel
computes it, and what rematerialisation computes again. They are what XLA's `cost_analysis` counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from holdfast.train.config import TrainConfig
from holdfast.train.memory import fuses_attention
from holdfast.train.model.config import ModelConfig
from holdfast.train.model.pattern import ATTENTION, MLP
from holdfast.train.parameters import held, parameters

CONVENTION: Final = "fwd + 2 x bwd, causal attention halved, recomputation not counted"

# Operations that are no products, as XLA counts them, forward and backward: for each number of the residual
# stream in a block, of queries, of the MLP, of attention scores, of logits; of the stream in the embedding;
# and for each parameter in a change of it. Measured.
_STREAM, _QUERY, _INNER, _SCORE, _LOGIT, _EMBED, _CHANGE = 28, 20, 19, 22, 15, 240, 37


@final
@dataclass(frozen=True, slots=True)
class Flops:
    """Model operations of some samples, forward and backward, by what they are for."""

    projections: int
    """Queries, keys, values and output of attention."""
    attention: int
    """Scores and weighted sums."""
    mlp: int
    head: int
    """The output projection."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.projections + self.attention + self.mlp + self.head


def model_flops(model: ModelConfig, samples: int, seq_len: int) -> Flops:
    """Model operations of one forward and backward pass over so many whole samples."""
    tokens = samples * seq_len
    queries = model.num_heads * model.head_size
    shared = model.kv_heads * model.head_size
    num_attention, num_mlp = (model.symbols.count(symbol) for symbol in (ATTENTION, MLP))
    return Flops(
        projections=6 * tokens * model.hidden * (2 * queries + 2 * shared) * num_attention,
        attention=6 * tokens * seq_len * queries * num_attention,
        mlp=18 * tokens * model.hidden * model.mlp_hidden * num_mlp,
        head=6 * tokens * model.hidden * model.vocab_size,
    )


def executed_flops(config: TrainConfig, program: str, samples: int, platform: str) -> float:
    """What a program of a step does on each device, as XLA counts it, for a microbatch of so many samples.

    XLA counts the body of a loop once, so scanned layers count as one unit; and nothing in a fused kernel.
    """
    mesh = config.mesh
    numbers = held(parameters(config.model), mesh, stored=True)
    if program == "apply":
        return float(_CHANGE * numbers)
    found = _products(config, samples, platform) + _rest(config, samples)
    if program == "more":
        return found + held(parameters(config.model), mesh, stored=mesh.zero >= 2)
    return found + (_CHANGE * numbers if program == "fused" else 0)


def _products(config: TrainConfig, samples: int, platform: str) -> float:
    """Matrix products: all pairs of positions, and what is computed again."""
    model = config.model
    counted = model_flops(model, samples, config.seq_len)
    attention = 0.0 if fuses_attention(model, platform) else 2.0 * counted.attention
    blocks = counted.projections + attention + counted.mlp
    if model.remat == "full" and platform == "cpu":
        # There the compiler finds projections that are computed again to be the same, and keeps them.
        blocks += attention / 3
    elif model.remat == "full":
        # Forward again, but for the last product of each block: nothing needs its result.
        queries, shared = model.num_heads * model.head_size, model.kv_heads * model.head_size
        last = counted.projections * queries / (2 * queries + 2 * shared) + counted.mlp / 3
        blocks += (blocks - last) / 3
    if model.layers == "scanned":
        blocks /= model.repeats
    return (blocks + counted.head) / config.mesh.num_devices


def _rest(config: TrainConfig, samples: int) -> float:
    model, mesh = config.model, config.mesh
    queries = model.num_heads * model.head_size
    num_attention, num_mlp = (model.symbols.count(symbol) for symbol in (ATTENTION, MLP))
    blocks = _STREAM * model.hidden * (num_attention + num_mlp)
    blocks += (_QUERY * queries + _SCORE * model.num_heads * config.seq_len) * num_attention
    blocks += _INNER * model.mlp_hidden * num_mlp
    if model.layers == "scanned":
        blocks //= model.repeats
    ends = _LOGIT * model.vocab_size + _EMBED * model.hidden
    return samples * config.seq_len * (blocks + ends) / mesh.num_devices
