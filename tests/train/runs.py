"""Whole runs in this process. What is compiled for one config is kept for the next run of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast import xla
from holdfast.arrays import flatten_tree
from holdfast.checkpoint import Checkpointer
from holdfast.train import programs
from holdfast.train.config import TrainConfig
from holdfast.train.program import Outcome, run_training
from holdfast.train.state import RunOptions

_made: dict[Any, Any] = {}


def _remembered(compiled: Any) -> Any:
    def remembered(fn: Any, *args: Any, name: str, **where: Any) -> Any:
        steps = fn.__wrapped__.__self__
        config = steps.config
        parts = (config.model, config.optimizer, config.mesh, config.batch.micro, config.seq_len, steps.keys)
        about = (name, str(args), *parts)
        if about not in _made:
            _made[about] = compiled(fn, *args, name=name, **where)
        return _made[about]

    return remembered


@contextmanager
def quick_programs() -> Iterator[None]:
    """Inside, no program is compiled twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "compiled", _remembered(xla.compiled))
        yield


def train(config: TrainConfig, folder: Path, **options: Any) -> Outcome:
    """A run of one in `folder`."""
    with quick_programs():
        return run_training(config, RunOptions(folder=str(folder), progress=False, **options))


Bits = dict[str, tuple[str, tuple[int, ...], bytes]]


def last_state(folder: Path, steps: int) -> Bits:
    """Every array of the checkpoint after the last step of a run: dtype, shape and bytes, by name.

    Fails if there is none of that step, or one array of a part is missing.
    """
    with Checkpointer(folder / "ckpt", journal=False) as kept:
        assert kept.latest() == steps
        assert kept.verify(steps) == []
        flat = flatten_tree(kept.load(step=steps))
    arrays = map(np.asarray, flat.leaves)
    found = {
        name: (str(one.dtype), one.shape, one.tobytes())
        for name, one in zip(flat.names(), arrays, strict=True)
    }
    params = {name.removeprefix("params/") for name in found if name.startswith("params/")}
    for moment in ("mu", "nu"):
        assert {f"opt/inner/0/{moment}/{name}" for name in params} <= set(found)
    assert {"opt/inner/0/count", "data/samples", "data/ledger"} <= set(found)
    assert any(name.startswith("rng") for name in found)
    return found
