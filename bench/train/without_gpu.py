"""What XLA makes of the recipe `dense_1b` on an H200 where there is none: its bytes beside our closed form.

`python -m bench.train.without_gpu [SETTING,SETTING...]...` in an environment that has JAX's plugin for GPUs
(`pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt`, of JAX's version; no driver and no library of CUDA
is needed). XLA compiles for a described device and times no kernels: this says nothing about speed.
`DEVICES=8` is for meshes. Prints one JSON object for each program.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from typing import Any

import jax
from jax.experimental import topologies

from holdfast.recipes import resolve
from holdfast.train.compiler import findings

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 device_memory_size: 150000000000
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def described(num_devices: int) -> list[Any]:
    """H200s that are not here."""
    importlib.import_module("jax_plugins.xla_cuda12").initialize()
    found: Any = topologies.get_topology_desc("", "cuda", target_config=H200, topology=f"1x1x{num_devices}")
    return list(found.devices)


def pretend(devices: list[Any]) -> None:
    """Have this process take them for its own: programs are made for them, and nothing can run."""
    jax.devices = jax.local_devices = lambda *_, **__: devices
    jax.default_backend = lambda: "gpu"
    attention = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    attention.check_cudnn_version = lambda: 91000  # type: ignore[attr-defined]
    attention.check_compute_capability = lambda *_, **__: True  # type: ignore[attr-defined]
    attention.is_cuda_compute_capability_equal = lambda *_, **__: False  # type: ignore[attr-defined]


def main() -> None:
    pretend(described(int(os.environ.get("DEVICES", "1"))))
    for text in sys.argv[1:] or ["batch.lanes=0,batch.micro=0"]:
        for one in findings(resolve("recipes.dense_1b", text.split(","))):
            print(json.dumps({"settings": text, **dataclasses.asdict(one), "bytes_error": one.bytes_error}))


if __name__ == "__main__":
    main()
