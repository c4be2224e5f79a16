"""Training: what the engine adds to a bare step, and on a GPU its share of the peak beside torch.compile."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench import machine
from bench.report import Bar, Refused, Report, Series

BARS = {
    "mfu": Bar("model FLOPs of a 956M step / 989.5 TFLOP/s (GPU)", "at least", 0.57),
    "vs_torch_compile": Bar("steps per second / torch.compile's (GPU)", "at least", 1.1),
    "scan_mfu": Bar("the same with scanned layers (GPU)", "at least", 0.5),
    "deterministic_cost": Bar("what deterministic kernels add to a step (GPU)", "at most", 0.05),
    "checkpoint_cost": Bar("what a save every 20 steps adds (GPU)", "at most", 0.02),
    "engine_overhead_ms": Bar("CPU time per step over a bare jitted step", "at most", 3),
}
FASTEST = "model.remat=none,model.weight_grads=compute"
"""What torch does too: gradients rounded to bfloat16 where they are made, nothing computed again."""
VARIANTS = {
    "free": f"{FASTEST},deterministic=false",
    "deterministic": FASTEST,
    "scanned": "model.weight_grads=compute,model.layers=scanned,deterministic=false",
}
_TIMEOUT_S = 600.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--gpu", action="store_true", help="measure steps on the GPU that is here")
    parser.add_argument(
        "--rounds", type=int, default=5, help="pairs of the comparison on the CPU (default 5)"
    )


def run(args: argparse.Namespace) -> Report:
    """Measure everything that can be measured here."""
    about = machine.description(Path.cwd())
    values: dict[str, float | None] = dict.fromkeys(BARS)
    raw: dict[str, Series] = {}
    notes: list[str] = []
    if args.gpu:
        _on_gpu(values, raw, notes)
    else:
        notes.append("without --gpu only the engine's own cost is measured")
        from bench.train.overhead import measured

        values["engine_overhead_ms"], raw["engine"], raw["bare"] = measured(
            1 if args.smoke else args.rounds, smoke=args.smoke
        )
    return Report(
        bars=BARS,
        values=values,
        method=_method(about),
        versions=machine.versions("holdfast", "jax", "jaxlib", "optax", "torch"),
        raw=raw,
        notes=notes,
    )


def _on_gpu(values: dict[str, float | None], raw: dict[str, Series], notes: list[str]) -> None:
    found = {}
    for name, variant in VARIANTS.items():
        found[name] = _answer("bench.train.gpu_step", variant)
    found["torch"] = _answer("bench.train.torch_step")
    saves = _answer("bench.train.gpu_saves", VARIANTS["free"])
    if "error" in saves:
        notes.append(f"saves: {saves['error']}")
    else:
        values["checkpoint_cost"] = saves["cost"]
        raw["20 steps, no save"] = Series(tuple(saves["plain_s"]))
        raw["20 steps, one save"] = Series(tuple(saves["saving_s"]))
        raw["save()"] = Series(tuple(saves["call_s"]))
    for name, result in found.items():
        if "error" in result:
            notes.append(f"{name}: {result['error']}")
        else:
            raw[f"{name} step"] = Series((result["step_ms"],), "ms")
            raw[f"{name} MFU"] = Series((100 * result["mfu"],), "%")
    times = {name: result.get("step_ms") for name, result in found.items()}
    values["mfu"] = found["free"].get("mfu")
    values["scan_mfu"] = found["scanned"].get("mfu")
    if times["free"]:
        if times["torch"]:
            values["vs_torch_compile"] = times["torch"] / times["free"]
        if times["deterministic"]:
            values["deterministic_cost"] = times["deterministic"] / times["free"] - 1


def _answer(module: str, *args: str) -> dict[str, Any]:
    """What one measuring process printed last; a process for each, so that none has the memory of another."""
    _progress(f"{module} {' '.join(args)}")
    command = [sys.executable, "-m", module, *args]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S, check=False)
    lines = done.stdout.splitlines()
    if not lines:
        raise Refused(f"{module} ended with {done.returncode} and said nothing")
    _progress(lines[-1])
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def _method(about: str) -> str:
    return (
        "On a GPU: the recipe dense_1b, 956M parameters (hidden 2048, 16 layers, 16 heads, SwiGLU "
        "5632, vocabulary 32,768), 16 samples of 2,048 tokens in one program, float32 parameters and "
        "AdamW, bfloat16 products, clipped; medians of groups of five steps after one group to warm "
        "up, one process after the other. Model FLOPs: causal attention halved, recomputation not "
        "counted, over 989.5 TFLOP/s. mfu: any kernels, as torch may use; deterministic_cost is what "
        "only deterministic ones add. checkpoint_cost: 20 steps with one save of the whole state, unfenced, "
        "against 20 without, in turns. torch: the same model, autocast, fused AdamW, torch.compile. On "
        "a CPU: CPU time of the training process per step of a tiny recipe, less that of the same "
        f"jitted functions called in a bare loop, in turns. Machine: {about}."
    )


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
