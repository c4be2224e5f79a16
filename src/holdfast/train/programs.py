"""The executables of a run: compiled once for all its replicas and restarts, and the same for all of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

import jax

from holdfast.train.step import Steps
from holdfast.xla import Executable, compiled

log = logging.getLogger("holdfast.train")

FOLDER: Final = "bundles"


def _joined(local: Any, where: Any, shape: Any) -> Any:
    """The array of which each process of the world has its own part."""
    return jax.make_array_from_process_local_data(where, local, shape.shape)  # type: ignore[no-untyped-call]


@final
class Programs:
    """What a step calls. `ready` takes each from the run's folder, or compiles it and puts it there.

    Shapes are those of one microbatch, so a batch that grows compiles nothing: except without lanes and with
    `batch.micro=0`, where a microbatch is the whole batch.
    """

    def __init__(self, steps: Steps, folder: Path, key: bytes) -> None:
        self.steps = steps
        self._folder = folder / FOLDER
        self._key = key
        self._made: dict[tuple[str, int], Executable] = {}

    def ready(self, names: tuple[str, ...], num_samples: int) -> None:
        """Have these programs for microbatches of `num_samples`. Blocks: while one is compiled."""
        missing = [name for name in names if (name, num_samples) not in self._made]
        if not missing:
            return
        examples = self.steps.examples(num_samples)
        for name in missing:
            fn = getattr(self.steps, name)
            one = compiled(fn, *examples[name], folder=self._folder, key=self._key, name=name)
            log.info("%s for %d samples: %s, %.1f s", name, num_samples, one.source, one.seconds)
            self._made[name, num_samples] = one

    def ready_for(self, size: int) -> int:
        """Have what a step with a batch of `size` calls; gives the samples of a microbatch."""
        batch = self.steps.config.batch
        micro = batch.micro or size
        if batch.is_fused(size):
            self.ready(("fused",), micro)
        else:
            # All sizes to come: a batch that grows then compiles nothing.
            several = any(batch.microbatches(phase.size) > 1 for phase in self.steps.config.batches.phases)
            self.ready(("first", "more", "apply") if several else ("first", "apply"), micro)
        return micro

    def digests(self) -> dict[str, str]:
        """What names the bits that each program gives; only those that have a name."""
        return {
            f"{name}/{size}": one.digest for (name, size), one in self._made.items() if one.digest is not None
        }

    def call(self, name: str, num_samples: int, *args: Any) -> Any:
        """What the program gives for these arguments."""
        return self._made[name, num_samples](*args)

    def placed(self, sums: Mapping[str, Any]) -> Any:
        """The sum of all lanes, as `step.total()` has it, for `apply`: in a world of several processes each
        has its own part of it."""
        if jax.process_count() == 1:
            return sums
        return jax.tree.map(
            _joined,
            dict(sums),
            self.steps.sums_shardings,
            self.steps.sums_shapes,
        )
