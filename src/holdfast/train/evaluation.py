"""The loss on held-out samples: always the same ones, in the same order, so that two numbers compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

from holdfast.train.data import Stream
from holdfast.train.programs import Programs

_PROGRAM: Final = "losses"


@final
class Evaluation:
    """Every replica computes all of it: nobody has to wait for one that evaluates for all."""

    def __init__(self, programs: Programs, stream: Stream) -> None:
        self._programs = programs
        self._stream = stream
        self._config = programs.steps.config.evaluation
        programs.ready((_PROGRAM,), self._config.batch)

    def due(self, steps: int, total: int) -> bool:
        """Whether the state after so many steps is to be measured: every so often, and at the end."""
        every = self._config.every
        return bool(every) and (steps % every == 0 or steps == total)

    def loss(self, params: Any) -> float:
        """The mean loss of a token. Blocks: until it is computed."""
        steps, size = self._programs.steps, self._config.batch
        rows = steps.local_rows(size)
        sums = []
        for at in range(0, self._config.samples, size):
            batch: Mapping[str, Any] = self._stream.batch(at + rows.start, at + rows.stop)
            placed = steps.put({key: batch[key] for key in steps.keys}, size)
            sums.append(self._programs.call(_PROGRAM, size, params, placed))
        # In the order of the samples, in Python's floats: the same for any mesh that gives the same sums.
        loss = sum(float(one) for one, _ in sums)
        tokens = sum(float(one) for _, one in sums)
        return loss / max(tokens, 1.0)
