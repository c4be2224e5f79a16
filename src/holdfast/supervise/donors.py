"""State out of a live replica and into a newcomer, while the donor goes on training.

A donor offers the state it holds under the number of the meeting that decided it; the step goes along. What a
program may write to in place (numpy arrays) is copied when it is offered; arrays of a framework that cannot
change are not. So the donor never waits for a reader.
"""

from __future__ import annotations

import logging
from typing import Any, Final, NamedTuple, final

import numpy as np

from holdfast import faults
from holdfast.arrays import flatten_tree
from holdfast.errors import HoldfastError
from holdfast.transfer import Endpoint, Publication

log = logging.getLogger("holdfast.supervise")

_NAME: Final = "state"
_LEASE_S: Final = 600.0
_KEEP: Final = 8


class Received(NamedTuple):
    """A state, the number of steps it has seen, and what it took to get it."""

    steps: int
    state: Any
    nbytes: int
    seconds: float


@final
class Donor:
    """What one worker offers to newcomers."""

    def __init__(self, *, run: str, token: bytes | None, bind: str = "127.0.0.1:0", name: str = "") -> None:
        self._endpoint = Endpoint(bind, run=run, token=token, name=name)
        self._offers: list[tuple[Publication, int]] = []

    @property
    def address(self) -> str:
        return self._endpoint.address

    def offer(self, meeting: int, steps: int, state: Any, *, readers: int, rank: int, world: int) -> None:
        """Offer a state to the newcomers that a meeting named. Blocks: for a copy of what may change.

        Failing to is their failure, not the donor's: they will not find it and ask again.
        """
        self.tidy()
        try:
            found = self._endpoint.publish(
                _NAME,
                {"state": _settled(state), "steps": steps},
                meeting,
                lease_s=_LEASE_S,
                keep=_KEEP,
                rank=rank,
                world=world,
            )
        except HoldfastError as error:
            log.warning("the state of step %d is not offered to newcomers: %s", steps, error.message)
            return
        self._offers.append((found, readers))
        faults.site("run.offered")

    def receive(
        self, peers: list[str], meeting: int, template: Any, *, rank: int, world: int, timeout_s: float
    ) -> Received:
        """The state that donors offer, in the shape of `template`.

        Blocks: until they have offered it and it is here. Fails: TransferError and its kinds, MismatchError.
        """
        into = {"state": template, "steps": 0}
        plan = self._endpoint.prepare(peers, _NAME, into=into, rank=rank, world=world, timeout_s=timeout_s)
        try:
            faults.site("run.receiving")
            done = plan.run(version=meeting, deadline_s=timeout_s).result()
            return Received(int(done.tree["steps"]), done.tree["state"], done.nbytes, done.seconds)
        finally:
            plan.close()

    def tidy(self) -> None:
        """Let go of what all have taken that were to take it; cheap."""
        if self._offers:
            self._offers = [one for one in self._offers if not _over(*one)]

    def close(self) -> None:
        self._endpoint.close()


def _over(offer: Publication, readers: int) -> bool:
    if sum(outcome == "committed" for outcome in offer.targets().values()) < readers:
        return False
    offer.release()
    return True


def _settled(state: Any) -> Any:
    """The state, with copies of the arrays that its owner may write to in place."""
    flat = flatten_tree(state)
    return flat.rebuild([leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in flat.leaves])
