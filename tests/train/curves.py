"""Loss curves of small recipes, to the last bit, on one stack: `python -m tests.train.curves FOLDER NAMES`.

Writes the curves to FOLDER/curves.json. What bits depend on is fixed by `environment`, before JAX starts.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

NPROC = "2"


def environment() -> dict[str, str]:
    """One device, a thread pool of one size, and short compiles: optimising costs more than it saves here."""
    flags = "--xla_backend_optimization_level=0"
    return {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": NPROC}


def stack() -> dict[str, str]:
    """What the bits of a curve are true for."""
    import jax
    import jaxlib.version

    from holdfast.jax.world import cpu_features

    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "processor": cpu_features(),
        "nproc": os.environ.get("NPROC", ""),
    }


def main(folder: Path, names: list[str]) -> None:
    from holdfast.train.metrics import read_metrics
    from holdfast.train.program import run_training
    from holdfast.train.state import RunOptions
    from tests.train.recipes import recipe

    found: dict[str, Any] = {"stack": stack(), "curves": {}}
    for name in names:
        outcome = run_training(recipe(name), RunOptions(folder=str(folder), progress=False))
        records = read_metrics(outcome.folder / "metrics.jsonl")
        found["curves"][name] = {
            "loss": [float(one["loss"]).hex() for one in records],
            "eval_loss": [float(one["eval_loss"]).hex() for one in records if "eval_loss" in one],
            "state": outcome.state,
            "ledger": outcome.ledger,
        }
    (folder / "curves.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
