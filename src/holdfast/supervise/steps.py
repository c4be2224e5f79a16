"""`Step`: what a training loop sees of one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol, final

from holdfast.errors import UsageError
from holdfast.supervise.step_round import StepRound


class Loop(Protocol):
    """What a step needs of its run."""

    def fence(self) -> None:
        """Return once the state may be changed."""
        ...

    def step_done(self, step: Step, state: Any, remarks: Remarks) -> None: ...


class Remarks(NamedTuple):
    """What a program says of a step beside its state, for a checkpoint of it; and whether to make one."""

    metrics: Mapping[str, Any]
    meta: Mapping[str, Any]
    save: bool


@final
class Step:
    """One step of a run.

    `index` counts the steps before it; `samples` is how many samples they consumed, if the run knows.
    """

    def __init__(
        self, index: int, samples: int | None, loop: Loop, round_: StepRound, *, alone: bool
    ) -> None:
        self.index = index
        self.samples = samples
        self._loop = loop
        self._round = round_
        self._alone = alone
        self.is_done = False

    @property
    def lanes(self) -> Iterator[int]:
        """The lanes to compute here, one after the other; add each before taking the next.

        Live: first those of this replica; then, if a replica is lost, some of its. It ends when the sum over
        all lanes of all replicas is complete. Blocks: until then. Fails: DeadlineError, FencedError.
        """
        return self._round.lanes()

    def add(self, lane: int, tree: Any) -> None:
        """Add the result of a lane, any tree of arrays, to the sum.

        numpy arrays are read before this returns. Arrays of JAX may be read while the next lane is computed:
        donate or delete none of them before the next `add` has returned, or `lanes` has ended. One that was
        makes that call fail: TreeError, never another sum.
        """
        self._round.add(lane, tree)

    def total(self) -> Any:
        """The sum of what all replicas have added, the same bits for all: numpy arrays in the same tree.

        Valid until the step after next begins. Blocks: only where the state of a save is still being
        captured.
        """
        self._loop.fence()
        return self._round.total()

    def done(
        self,
        state: Any,
        metrics: Mapping[str, Any] | None = None,
        *,
        meta: Mapping[str, Any] | None = None,
        save: bool = False,
    ) -> None:
        """The step is over and this is the state after it. Saves, where it is time to, or where told to.

        Until the next step's `total` returns, the state must not be changed. `metrics` and `meta` (JSON) go
        into the metadata of a checkpoint of this state. All workers of a replica give the same `save`.
        """
        if self.is_done:
            raise UsageError(f"step {self.index}: step.done() was called twice", hint="call it once per step")
        if not self._round.decided and (self._round.begun or not self._alone):
            raise UsageError(
                f"step {self.index} is not decided: step.lanes was not gone through to its end",
                hint="for lane in step.lanes: step.add(lane, ...) ; then step.total()",
            )
        self.is_done = True
        self._loop.step_done(self, state, Remarks(metrics or {}, meta or {}, save))

    @property
    def lanes_computed(self) -> tuple[int, ...]:
        """The lanes that are in this worker's sums."""
        return tuple(self._round.counted)
