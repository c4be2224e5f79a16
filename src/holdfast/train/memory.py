"""How many bytes of a device a run takes, in closed form.

At rest lie parameters and optimizer state; while a step is computed, gradients, weights in the compute dtype,
what the forward pass keeps for the backward pass, and a workspace. What is kept follows from what
`model.remat` computes again. The most is in use where the backward pass begins, so the workspace is the
largest of three: that of the logits, of one attention block and of one MLP block.

Accelerators keep what the model asks them to; what else they do was read off programs that XLA compiled for
an H200 (bench/train/without_gpu.py). XLA's CPU compiler merges what is computed again with the first time, so
that `remat` saves little there; its habits are measured (tests/train/test_estimates.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

from holdfast.train.config import TrainConfig
from holdfast.train.mesh import MeshConfig
from holdfast.train.model.config import ModelConfig
from holdfast.train.model.pattern import ATTENTION, MLP
from holdfast.train.parameters import WIDTHS, Parameter, held, parameters

_FLOAT: Final = 4
_FUSED_HEAD: Final = 128
"""The widest head that the fused attention kernel takes; others keep the scores of all pairs of positions."""


@final
@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of each device, at the moment when the most is in use."""

    params: int
    optimizer: int
    sums: int
    """Gradients: of a microbatch, or added up over several. None where a step is one program."""
    casts: int
    """Weights in the compute dtype, and those that a mesh gathers for a product."""
    kept: int
    """What the forward pass keeps for the backward pass."""
    workspace: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.params + self.optimizer + self.sums + self.casts + self.kept + self.workspace


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Habits:
    """What a compiler makes of a step."""

    stream: float
    """Copies of the residual stream that a block keeps; sums may be made again instead."""
    again: float
    """More of them where norms are not computed again."""
    heads: float
    """Copies of queries and keys in float32 where these are normed."""
    scores: bool
    """Whether unrolled layers keep attention scores that the model would compute again."""
    logits: float
    """Copies of the logits at a time."""
    attention: float
    """Copies of the scores of an attention block at a time."""
    mlp: float
    """Copies of the width of an MLP block at a time."""
    table: tuple[float, float]
    """Copies of the output projection's gradient beside the logits; where it is the embedding's too."""
    first: tuple[float, float]
    """The share of gradients that lies beside activations, of unrolled and of scanned layers; the others take
    the place of those they are made of."""
    more: tuple[float, float]
    """Copies of the gradients beside those that they are added to, of unrolled and of scanned layers."""
    change: tuple[float, float, float]
    """Copies of the parameters while they change; where optimizer state alone is split; where all is."""
    fused: tuple[float, float]
    """How much more a pass takes in one program with that change; where weights are gathered."""
    gathered: Mapping[str, float]
    """Copies of the part of the residual stream that is other devices' that an unrolled block has around, by
    `remat`. It is gathered for each product, and the compiler gathers ahead."""
    around: tuple[float, float]
    """As many more of them at a time, of unrolled and of scanned layers."""
    ahead: Mapping[str, float]
    """Copies of all weights of unrolled layers, with gradients that are not scattered yet, that there are at
    a time where each is gathered for its product, by `remat`."""


_ACCELERATOR: Final = _Habits(
    stream=1.0,
    again=1.0,
    heads=0.5,
    scores=False,
    logits=2.0,
    attention=3.0,
    mlp=3.0,
    table=(1.0, 1.0),
    first=(0.15, 1.0),
    more=(0.0, 1.0),
    change=(0.0, 0.0, 0.0),
    fused=(1.0, 1.0),
    gathered={"light": 0.8, "none": 1.6, "full": 1.15},
    around=(4.0, 10.0),
    ahead={"light": 1.7, "none": 1.2, "full": 2.1},
)
_CPU: Final = _Habits(
    stream=0.25,
    again=0.75,
    heads=2.75,
    scores=True,
    logits=1.75,
    attention=2.25,
    mlp=3.5,
    table=(0.0, 2.0),
    first=(1.0, 1.0),
    more=(0.3, 1.0),
    change=(1.8, 1.4, 0.85),
    fused=(1.35, 1.15),
    gathered={"light": 0.0, "none": 0.0, "full": 0.0},
    around=(0.0, 0.0),
    ahead={"light": 0.0, "none": 0.0, "full": 0.0},
)


def _habits(platform: str) -> _Habits:
    return _CPU if platform == "cpu" else _ACCELERATOR


def memory(config: TrainConfig, platform: str = "gpu") -> Memory:
    """What each device of a replica needs for this run. The config must be free of mistakes."""
    found = parameters(config.model)
    samples = config.batch.micro or max(phase.size for phase in config.batches.phases)
    kept, workspace = activations(config, samples, platform)
    # In one program with the update, gradients take the place of activations.
    sums = 0 if programs(config) == ("fused",) else _sums(config, found)
    habits = _habits(platform)
    workspace += round(habits.more[config.model.layers == "scanned"] * sums)
    return Memory(
        params=_params(config, found),
        optimizer=_optimizer(config, found),
        sums=sums,
        casts=_casts(config, found, platform),
        kept=kept,
        workspace=workspace,
    )


def programs(config: TrainConfig) -> tuple[str, ...]:
    """The programs of a step: one for all where the batch is one microbatch of one world."""
    fused = all(config.batch.is_fused(phase.size) for phase in config.batches.phases)
    return ("fused",) if fused else ("first", "more", "apply")


def program_bytes(config: TrainConfig, program: str, samples: int, platform: str) -> int:
    """What one of a step's programs takes on a device: arguments, results and everything in between."""
    found = parameters(config.model)
    sums = _sums(config, found)
    batch = samples * config.seq_len // (config.mesh.data * config.mesh.fsdp) * _FLOAT
    batch *= 5 if config.data.separate else 3
    habits = _habits(platform)
    at_rest = _params(config, found) + _optimizer(config, found)
    change = (
        habits.change[_shared(config.mesh)] * held(found, config.mesh, stored=config.mesh.zero >= 3) * _FLOAT
    )
    if program == "apply":
        return round(at_rest + sums + change)
    computed, casts = sum(activations(config, samples, platform)), _casts(config, found, platform)
    if program == "fused":
        # Weights are let go before parameters change.
        more = habits.fused[_shared(config.mesh) == 2]
        return round(at_rest + batch + more * computed + max(casts, change))
    scanned = config.model.layers == "scanned"
    held_once = _params(config, found) + batch
    if program == "first":
        return round(held_once + casts + max(sums, computed + habits.first[scanned] * sums))
    return round(held_once + casts + sums + computed + habits.more[scanned] * sums)


def activations(config: TrainConfig, samples: int, platform: str) -> tuple[int, int]:
    """Bytes kept for the backward pass, and of the workspace, for a microbatch of so many samples."""
    model, mesh = config.model, config.mesh
    habits = _habits(platform)
    width = _width(model, platform)
    tokens = samples * config.seq_len // (mesh.data * mesh.fsdp)
    stream = width * model.hidden / (mesh.tensor if mesh.sequence_parallel else 1)
    inner = width * model.mlp_hidden / mesh.tensor
    # Softmax is made in float32; in a fused kernel there are no scores but in registers.
    pairs = 0.0 if fuses_attention(model, platform) else model.num_heads * config.seq_len / mesh.tensor
    attention, mlp = _kept_by_blocks(model, mesh, habits, stream, width)
    num_attention, num_mlp = (model.symbols.count(symbol) for symbol in (ATTENTION, MLP))
    again = model.remat == "full" or (habits.scores and model.layers == "scanned")
    keeps_scores = not again and (habits.scores or model.remat == "none")
    if model.remat == "full" and not habits.scores:
        kept = stream * (num_attention + num_mlp)
    else:
        kept = attention * num_attention + mlp * num_mlp + _FLOAT * pairs * keeps_scores * num_attention
    # What a device has of other devices' parts of the stream, for each token.
    others = width * model.hidden * (1 - 1 / mesh.tensor)
    if model.layers != "scanned":
        kept += habits.gathered[model.remat] * others * (num_attention + num_mlp)
    share = 1.0 if not model.loss_chunk else min(1.0, model.loss_chunk / config.seq_len)
    inside = max(habits.attention * pairs * (width + _FLOAT) / 2, habits.mlp * inner)
    if again:
        inside += attention + mlp + _FLOAT * pairs * (2 if model.layers == "scanned" else 1)
    logits = habits.logits * width * model.vocab_size / mesh.tensor * share
    workspace = max(tokens * logits, tokens * inside + _ahead(config, habits))
    workspace += tokens * habits.around[model.layers == "scanned"] * others
    table = habits.table[model.tied] * _FLOAT * model.vocab_size * model.hidden / mesh.tensor
    return round(tokens * kept), round(workspace + table)


def _kept_by_blocks(
    model: ModelConfig, mesh: MeshConfig, habits: _Habits, stream: float, width: int
) -> tuple[float, float]:
    """Bytes that an attention and an MLP block keep for each token, but for attention scores."""
    queries = model.num_heads * model.head_size / mesh.tensor
    shared = model.kv_heads * model.head_size / mesh.tensor
    inner = width * model.mlp_hidden / mesh.tensor
    attention = habits.stream * stream + 2 * (queries + shared) * width
    if model.qk_norm:
        attention += habits.heads * (queries + shared) * _FLOAT
    mlp = habits.stream * stream + 2 * inner
    if model.remat == "none":
        return attention + habits.again * stream, mlp + habits.again * stream + inner
    return attention, mlp


def _shared(mesh: MeshConfig) -> int:
    """What the fsdp axis splits: nothing (0), optimizer state and perhaps gradients (1), or all (2)."""
    return 0 if mesh.fsdp == 1 else 1 if mesh.zero < 3 else 2


def _width(model: ModelConfig, platform: str) -> int:
    """Bytes of an activation. CPUs compute in float32, and keep that where nothing is computed again."""
    return _FLOAT if platform == "cpu" and model.remat == "none" else WIDTHS[model.compute_dtype]


def fuses_attention(model: ModelConfig, platform: str) -> bool:
    """Whether attention is one kernel that never has all scores at once."""
    if platform not in ("gpu", "cuda") or model.attention == "xla":
        return False
    fits = model.head_size <= _FUSED_HEAD and model.head_size % 8 == 0
    return fits and model.compute_dtype in ("bfloat16", "float16")


# ---- what lies where, exactly


def _params(config: TrainConfig, found: list[Parameter]) -> int:
    return held(found, config.mesh, stored=config.mesh.zero >= 3) * WIDTHS[config.model.param_dtype]


def _optimizer(config: TrainConfig, found: list[Parameter]) -> int:
    """Two moments, or what a named transformation keeps, and a float32 copy of narrower parameters."""
    rests = held(found, config.mesh, stored=True)
    main = 0 if config.model.param_dtype == "float32" else _FLOAT * rests
    if config.optimizer.transformation:
        return main + _kept_by_named(config, found)
    shards = config.optimizer.flat_shards
    moments = sum(one.size for one in found) // shards if shards else rests
    return main + _FLOAT * 2 * moments


def _kept_by_named(config: TrainConfig, found: list[Parameter]) -> int:
    """What lies beside parameters rests as they do; everything else is on every device."""
    from holdfast.train.transformations import kept

    beside, shards = 0.0, config.optimizer.flat_shards
    by_name, other = kept(config.optimizer, config.model)
    for one in found:
        share = 1 / shards if shards else held([one], config.mesh, stored=True) / one.size
        beside += by_name[one.name] * share
    return round(beside) + other


def _sums(config: TrainConfig, found: list[Parameter]) -> int:
    return _FLOAT * held(found, config.mesh, stored=config.mesh.zero >= 2)


def _casts(config: TrainConfig, found: list[Parameter], platform: str) -> int:
    """Matrices in the compute dtype, and one block's worth that is gathered from the shards."""
    model, mesh = config.model, config.mesh
    matrices = [one for one in found if one.is_matrix(scanned=model.layers == "scanned")]
    width = WIDTHS[model.compute_dtype]
    at_rest = 0
    if model.compute_dtype != model.param_dtype and platform != "cpu":
        at_rest = held(matrices, mesh, stored=mesh.zero >= 3) * width
    if mesh.fsdp == 1 or mesh.zero == 1:
        return at_rest
    whole = held(matrices, mesh, stored=False) * width
    if platform == "cpu":
        # It gathers all weights ahead, and holds half of the gradients before they are scattered.
        return at_rest + (whole if mesh.zero == 3 else whole // 2)
    return at_rest + _two_blocks(whole, model)


def _two_blocks(whole: int, model: ModelConfig) -> int:
    """A block before it is used, and one whose gradient is on its way."""
    return 2 * whole // max(1, len(model.symbols))


def _ahead(config: TrainConfig, habits: _Habits) -> float:
    """What of gathered weights there is inside of the layers, beyond what there is while the loss is made."""
    model, mesh = config.model, config.mesh
    if not habits.ahead[model.remat] or mesh.fsdp == 1 or mesh.zero < 3 or model.layers == "scanned":
        return 0.0
    matrices = [one for one in parameters(model) if one.is_matrix(scanned=False)]
    layers = [one for one in matrices if "vocab" not in one.logical]
    width = WIDTHS[model.compute_dtype]
    whole = held(matrices, mesh, stored=False) * width
    inside = habits.ahead[model.remat] * held(layers, mesh, stored=False) * width
    return inside - _two_blocks(whole, model)
