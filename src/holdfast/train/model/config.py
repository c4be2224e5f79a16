"""What a decoder is made of. Nothing here imports JAX: configs are checked before any device is touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from holdfast.train.model.pattern import ATTENTION, MLP, pattern_problems
from holdfast.train.problems import Problem, at_least, one_of, refuse

if TYPE_CHECKING:
    from holdfast.train.model.decoder import Decoder

DTYPES = ("float32", "bfloat16", "float16", "float64")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Stretches rotary embeddings to longer contexts as Llama 3.1 does: it divides low frequencies."""

    factor: float
    """How much longer the context becomes."""
    low_freq_factor: float = 1.0
    """Wavelengths above `original_positions / low_freq_factor` are stretched fully."""
    high_freq_factor: float = 4.0
    """Wavelengths below `original_positions / high_freq_factor` are left as they are."""
    original_positions: int = 8192
    """The context that the frequencies were made for."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder language model: pre-norm residual blocks in the order of `pattern`, `repeats` times."""

    pattern: str = "*-"
    """One symbol for each residual block: `*` attention, `-` MLP."""
    repeats: int = 4
    """How often the pattern is repeated: `*-` four times is what others call four layers."""
    vocab_size: int
    """Rows of the embedding: at least the number of tokens."""
    hidden: int
    """Width of the residual stream."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int | None = None
    """Key and value heads, each shared by a group of query heads; None: as many as `num_heads`."""
    head_dim: int | None = None
    """Width of a head; None: `hidden / num_heads`."""
    mlp_hidden: int
    """Width of the MLP between its gate/up and down projections."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Stretches the rotary frequencies; None: as they are."""
    norm_eps: float = 1e-6
    """Added to the mean square under the root of RMSNorm."""
    tied: bool = True
    """Whether the output projection is the embedding."""
    qkv_bias: bool = False
    """A bias on queries, keys and values (Qwen2)."""
    qk_norm: bool = False
    """RMSNorm over each head of queries and keys (Qwen3)."""
    init_std: float = 0.02
    """Deviation of new weights; those that add into the stream get it over the root of the blocks."""
    param_dtype: str = "float32"
    """What parameters are stored and updated in."""
    compute_dtype: str = "bfloat16"
    """Of matrix products and the residual stream. Norms, softmax, loss and weight gradients are float32."""
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """`cudnn`: the fused kernel (NVIDIA, 16-bit compute); `xla`: everywhere; `auto`: the first that fits."""
    remat: Literal["light", "none", "full"] = "light"
    """What the backward pass computes again: `light` norms, SwiGLU and the softmax of `xla` attention; `full`
    whole blocks; `none` nothing that a matrix product reads, for the most memory."""
    weight_grads: Literal["float32", "compute"] = "float32"
    """What the products that make the layers' weight gradients give: `compute` rounds them to
    `compute_dtype`, as most engines do. They are added up in float32 in any case."""
    layers: Literal["unrolled", "scanned"] = "unrolled"
    """`unrolled`: each layer compiled for itself, fast steps; `scanned`: one unit compiled, fast compiles."""
    loss_chunk: int = 0
    """Sequence positions whose logits exist at a time; 0: all. Smaller takes less memory and more time."""

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.hidden // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def symbols(self) -> str:
        """The whole model, one symbol for each residual block."""
        return self.pattern * self.repeats

    @property
    def num_params(self) -> int:
        """Parameters, all counted."""
        hidden, head = self.hidden, self.head_size
        qkv = self.num_heads + 2 * self.kv_heads
        attention = hidden * qkv * head + self.num_heads * head * hidden + hidden
        attention += qkv * head * self.qkv_bias + 2 * head * self.qk_norm
        mlp = 3 * hidden * self.mlp_hidden + hidden
        embedding = self.vocab_size * hidden * (1 if self.tied else 2)
        symbols = self.symbols
        return embedding + hidden + attention * symbols.count(ATTENTION) + mlp * symbols.count(MLP)

    def problems(self, setting: str = "model") -> list[Problem]:
        """Everything that is wrong with it by itself."""
        found = pattern_problems(f"{setting}.pattern", self.pattern)
        for name in ("repeats", "vocab_size", "hidden", "num_heads", "mlp_hidden"):
            found += at_least(f"{setting}.{name}", getattr(self, name), 1)
        found += at_least(f"{setting}.loss_chunk", self.loss_chunk, 0)
        found += one_of(f"{setting}.param_dtype", self.param_dtype, DTYPES)
        found += one_of(f"{setting}.compute_dtype", self.compute_dtype, DTYPES)
        found += one_of(f"{setting}.attention", self.attention, ("auto", "xla", "cudnn"))
        found += one_of(f"{setting}.remat", self.remat, ("light", "none", "full"))
        found += one_of(f"{setting}.weight_grads", self.weight_grads, ("float32", "compute"))
        found += one_of(f"{setting}.layers", self.layers, ("unrolled", "scanned"))
        if found:
            return found  # what follows divides by these
        found += self._head_problems(setting)
        if self.rope_theta <= 0:
            found.append(Problem(f"{setting}.rope_theta", f"is {self.rope_theta}", "it must be positive"))
        if self.attention == "cudnn" and self.compute_dtype not in ("bfloat16", "float16"):
            message = f"is 'cudnn', which cannot compute in {self.compute_dtype}"
            hint = f"use attention 'auto', or {setting}.compute_dtype 'bfloat16'"
            found.append(Problem(f"{setting}.attention", message, hint))
        return found

    def _head_problems(self, setting: str) -> list[Problem]:
        found = []
        if self.head_dim is None and self.hidden % self.num_heads:
            near = self.hidden // self.num_heads * self.num_heads
            hint = f"{near or self.num_heads} or {near + self.num_heads}, or set {setting}.head_dim"
            message = f"is {self.hidden}, which {self.num_heads} heads do not divide"
            found.append(Problem(f"{setting}.hidden", message, hint))
        elif self.head_size < 2 or self.head_size % 2:
            message = f"makes heads of {self.head_size}, and rotary embeddings turn pairs"
            found.append(Problem(f"{setting}.head_dim", message, f"set it to {max(2, self.head_size + 1)}"))
        if self.kv_heads < 1 or self.num_heads % self.kv_heads:
            fit = [str(n) for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            message = f"is {self.kv_heads}, which does not divide {self.num_heads} heads"
            found.append(Problem(f"{setting}.num_kv_heads", message, f"choose one of {', '.join(fit)}"))
        return found

    def build(self) -> Decoder:
        """The model. Fails: ConfigError with every problem."""
        refuse(self.problems())
        from holdfast.train.model.decoder import Decoder

        return Decoder(self)
