"""A decided total that another member holds, and how a laggard takes it."""

from __future__ import annotations

from typing import final

from holdfast import faults
from holdfast.errors import ReduceError
from holdfast.reduce.banks import Flat
from holdfast.reduce.exchange import Watch
from holdfast.reduce.hub import Hub, Member
from holdfast.reduce.layout import FlatLayout
from holdfast.reduce.links import Link
from holdfast.reduce.messages import Held, Shape
from holdfast.reduce.trees import disagreement


@final
class HeldTotal:
    """The total of a step, at a member. Every call blocks and fails as `watch` says."""

    def __init__(self, step: int, member: Member, hub: Hub, watch: Watch) -> None:
        self._step, self._member, self._hub, self._watch = step, member, hub, watch
        self._waiting = {member.slot: member}
        watch.until(lambda: {} if hub.link(member.incarnation) is not None else self._waiting, "a link")
        with hub.changed:
            link = hub.link(member.incarnation)
        assert link is not None
        self._link: Link = link

    def shape(self) -> Shape:
        """What the member's arrays are."""
        link = self._link
        self._watch.until(lambda: {} if link.shape is not None else self._waiting, "word of the arrays")
        assert link.shape is not None
        return link.shape

    def copy(self, layout: FlatLayout, into: Flat) -> None:
        """Bring it here, and know that it is whole. Fails: also ReduceError, MismatchError."""
        held = self._held(layout)
        if self._link.lent:
            into.memory[:] = self._link.flat(held.bank, layout.blocks, layout.nbytes).memory
            faults.site("reduce.fetched")
            valid = self._link.valid(held.bank, held.epoch)
        else:
            with self._hub.changed:
                reading = self._link.ask(held.bank, held.epoch, range(len(layout.blocks)), into)
                self._hub.nudge()
            self._watch.until(lambda: {} if reading.void or not reading.missing else self._waiting, "blocks")
            valid = not reading.missing
        if not valid:
            raise self._gone("has let go of")

    def _held(self, layout: FlatLayout) -> Held:
        link = self._link
        with self._hub.changed:
            request = link.want(self._step)
            self._hub.nudge()
        self._watch.until(lambda: {} if request in link.answers else self._waiting, "an answer")
        with self._hub.changed:
            held = link.answers.pop(request)
        if held.epoch == 0:
            raise self._gone("does not have")
        if held.layout != layout.digest:
            raise disagreement(layout, link.shape, self._member.slot)
        return held

    def _gone(self, what: str) -> ReduceError:
        slot = self._member.slot
        return ReduceError(f"slot {slot} {what} the total of step {self._step}", slots=(slot,))
