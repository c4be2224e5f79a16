"""Makes the golden models: tiny random Llama, Qwen2 and Qwen3, with the logits of `transformers` for them.

    python -m venv /tmp/hub && /tmp/hub/bin/pip install torch==2.13.0 transformers==5.22.2 safetensors numpy
    /tmp/hub/bin/python tests/train/model/golden/make.py

Weights are drawn wider than a real model's, so that every part of it shows in the logits.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PLAIN = {"rope_type": "default", "rope_theta": 1000.0}


def make(name: str, config: transformers.PreTrainedConfig, dtype: torch.dtype, shard: str) -> None:
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms begin as ones and biases as zeros, which would hide a wrong one
            parameter.data += 0.3 * torch.randn_like(parameter)
    model = model.to(dtype)
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokens = torch.randint(0, SMALL["vocab_size"], (2, 48))
    with torch.no_grad():
        # Read back: `model` itself has its rotary frequencies rounded to `dtype` as well.
        read = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        logits = read(tokens).logits
    np.save(folder / "tokens.npy", tokens.numpy().astype(np.int32))
    np.save(folder / "logits.npy", logits.numpy().astype(np.float32))
    (folder / "made_with.json").write_text(
        json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}) + "\n"
    )


if __name__ == "__main__":
    llama = transformers.LlamaConfig(**SMALL, rope_parameters=LLAMA3, tie_word_embeddings=False)
    make("llama", llama, torch.float32, "5GB")
    qwen2 = transformers.Qwen2Config(**SMALL, rope_parameters=PLAIN, tie_word_embeddings=True)
    make("qwen2", qwen2, torch.bfloat16, "20KB")
    qwen3 = transformers.Qwen3Config(**SMALL, head_dim=16, rope_parameters=PLAIN, tie_word_embeddings=True)
    make("qwen3", qwen3, torch.float32, "60KB")
