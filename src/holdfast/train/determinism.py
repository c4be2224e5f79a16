"""What a step is compiled with on a GPU, so that it is fast and, if asked, has the same bits every time.

XLA leaves out kernels that add in no fixed order when it is told to. For cuDNN's attention it then builds a
deterministic backward graph, but writes that into the instruction only after taking its fingerprint
(openxla/xla pull request 46500): instructions that are alike share one graph, the first of them no longer
finds it, and the step fails with `raw_hash_map<>::at`. If the instruction says so from the start, both agree.
The private part of JAX for that is in this file.
"""

from __future__ import annotations

import functools
import json
import logging
from typing import Any, Final

log = logging.getLogger("holdfast.train")

_CONFIG: Final = "create_dot_product_attention_backend_config"
"""Makes the text that goes with a call of cuDNN's attention; same name and arguments in JAX 0.10 and 0.11."""


_OPTIONS: Final[dict[str, bool]] = {
    # cuBLAS is as fast for the products of a decoder, and there is half as much to compile and to time.
    "xla_gpu_enable_triton_gemm": False,
    # In a scan it would compute every product twice whose result is kept and also used at once: once into the
    # stack of all layers' results, once for what comes next. To copy the result takes a sixth of that.
    "xla_gpu_enable_dynamic_slice_fusion": False,
}


def compiler_options(platform: str, *, deterministic: bool) -> dict[str, bool]:
    """What to tell the compiler for a kind of device. On a CPU a program is deterministic as it is."""
    if platform not in ("gpu", "cuda"):
        return {}
    if not deterministic:
        return dict(_OPTIONS)
    _say_so_from_the_start()
    return {**_OPTIONS, "xla_gpu_exclude_nondeterministic_ops": True}


def _say_so_from_the_start() -> None:
    """From now on attention that is lowered in this process asks for the deterministic backward graph."""
    from jax._src.cudnn import fused_attention_stablehlo as attention

    made = getattr(attention, _CONFIG, None)
    if made is None:
        log.warning("this JAX has no %s: set model.attention=xla if the step fails", _CONFIG)
    elif not hasattr(made, "__wrapped__"):
        setattr(attention, _CONFIG, deterministic_config(made))


def deterministic_config(made: Any) -> Any:
    """`made`, with the mark for a deterministic graph in what it makes."""

    @functools.wraps(made)
    def marked(*args: Any, **kwargs: Any) -> str:
        config = json.loads(made(*args, **kwargs))
        config["cudnn_fmha_backend_config"]["force_deterministic"] = True
        return json.dumps(config)

    return marked
