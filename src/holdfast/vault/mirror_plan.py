"""What must be copied to a mirror, in which order, and what may be removed there. Pure.

States of a step on the mirror, as one rank sees it:

    unsent -> given (this rank's parts and their indexes are there) -> whole (the manifest is there)
           -> left  (it will not be sent: not asked for, pruned before it was, or damaged here)

Part data comes first, then the part's index, last the manifest, and that by rank 0 alone. So an index says
that its part is whole, and the manifest that the step is. A step with parts and without a manifest is half
copied: nobody reads it, the next vault goes on with it, and once a newer step is whole and this one is not
due any more, it is rubbish.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, Literal, NamedTuple, final

from holdfast.errors import StepExistsError
from holdfast.format import SaveId, parse_file_name
from holdfast.storage import TEMPORARY

RETRY_S: Final = 1.0
"""How long to wait after a first failure; twice as long after each further one, up to LONGEST_S."""
LONGEST_S: Final = 60.0
LOOK_S: Final = 0.2
"""How soon to look for what other ranks have sent; half as long again after each look, up to SELDOM_S."""
SELDOM_S: Final = 10.0


class Send(NamedTuple):
    """Copy this rank's parts of this save."""

    step: int
    attempt: str


class Look(NamedTuple):
    """See whether the other ranks have copied theirs."""

    step: int
    attempt: str


class Rest(NamedTuple):
    """There is nothing to do for so long; None: until something happens."""

    seconds: float | None


def selected(steps: Collection[int], sent: Collection[int], every: int) -> set[int]:
    """The steps that are to be on the mirror: the first at or after each multiple of `every`.

    `steps` are those in the folder, `sent` those that were copied, whether or not they are still anywhere.
    A step that the folder begins with, after others were sent, was passed over before.
    """
    known = sorted({*steps, *sent})
    found = {step for step in steps if step % every == 0 or step in sent}
    if known and not sent:
        found.add(known[0])
    found.update(step for before, step in pairwise(known) if before // every < step // every)
    return found & set(steps)


def wanted(steps: Collection[int], sent: Collection[int], every: int, most: int | None) -> set[int]:
    """The selected steps without those that the mirror would not keep: it has at most `most`, the newest.

    Records newer than everything here say nothing: the run went back to an earlier step.
    """
    newest = max(steps, default=-1)
    past = {step for step in sent if step <= newest}
    found = selected(steps, past, every)
    return found if most is None else found & set(sorted({*found, *past})[-most:])


def own_parts(parts: Iterable[int], rank: int, world: int) -> list[int]:
    """The parts that a rank copies; those of ranks that are no more are shared out."""
    return sorted(part for part in parts if part % world == rank)


class Known(NamedTuple):
    """A save and when it was made, as a manifest says."""

    save: SaveId
    created: float


def standing(mine: Known, theirs: Known | None) -> Literal["create", "replace", "whole"]:
    """What the manifest on the mirror means for a save that is to be there.

    Fails: StepExistsError if the mirror has a newer save of the step, or one of another run.
    """
    if theirs is None:
        return "create"
    if theirs.save == mine.save:
        return "whole"
    if theirs.save.run == mine.save.run and theirs.created <= mine.created:
        return "replace"
    raise StepExistsError(
        f"the mirror has another save of step {mine.save.step}: {theirs.save}, not {mine.save}",
        hint="do two runs have the same mirror? give each its own",
    )


def rubbish(
    found: Mapping[int, Sequence[str]], whole: Mapping[int, str], busy: Collection[int]
) -> list[tuple[int, str]]:
    """The files (step and name) on a mirror that belong to no step and never will.

    `found` are the names in the step folders there, `whole` the steps with a manifest and the attempt it
    names, `busy` the steps that are due or under way. What is newer than every whole step is left alone:
    somebody may be at it.
    """
    newest = max(whole, default=-1)
    gone = []
    for step, names in sorted(found.items()):
        if step in busy or (step not in whole and step > newest):
            continue
        for name in names:
            parsed = parse_file_name(name)
            stale = parsed is not None and parsed.kind != "manifest" and parsed.attempt != whole.get(step)
            if stale or name.startswith(TEMPORARY):
                gone.append((step, name))
    return gone


@final
class Pace:
    """Spreads bytes over time so that there are never more than `rate` of them in a second."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._free_at = 0.0

    def delay_s(self, nbytes: int, now: float) -> float:
        """How long to wait before these bytes go."""
        if self._rate is None:
            return 0.0
        begin = max(now, self._free_at)
        self._free_at = begin + nbytes / self._rate
        return begin - now


class _Given(NamedTuple):
    attempt: str
    look_at: float
    wait_s: float


@final
class Agenda:
    """What one rank has to do for a mirror. It is told what is seen, and asked what is next.

    `leads` is rank 0, which creates the manifests and so waits for the other ranks.
    """

    def __init__(self, *, every: int, leads: bool, most: int | None = None) -> None:
        self._every = every
        self._most = most
        self._leads = leads
        self._local: dict[int, str] = {}
        self._sent: dict[int, str] = {}
        self._given: dict[int, _Given] = {}
        self._left: dict[int, str] = {}
        self._last: int | None = None
        self._failures = 0
        self._retry_at = 0.0

    def copied(self) -> Agenda:
        """One that goes on from here by itself. Safe from any thread: a dict is copied at once."""
        made = copy.copy(self)
        made._given, made._left = dict(self._given), dict(self._left)
        return made

    # ---- what is seen

    def see(self, local: Mapping[int, str], sent: Mapping[int, str]) -> None:
        """The steps that are committed here now and those that were copied, each with its attempt."""
        self._local = dict(local)
        self._sent = dict(sent)
        for step in [step for step in self._left if step not in self._local]:
            del self._left[step]
        for step, given in list(self._given.items()):
            # What is recorded as whole is not looked for again: the mirror may have removed it by now.
            if step not in self._local or self._sent.get(step) == given.attempt:
                del self._given[step]

    def given(self, step: int, attempt: str, now: float) -> None:
        """This rank's parts of the step are there."""
        self._given[step] = _Given(attempt, now, LOOK_S)

    def lost(self, step: int) -> None:
        """This rank's parts of the step are not there any more."""
        self._given.pop(step, None)

    def looked(self, step: int, now: float) -> None:
        """The other ranks were not ready."""
        before = self._given[step]
        self._given[step] = _Given(before.attempt, now + before.wait_s, min(SELDOM_S, 1.5 * before.wait_s))

    def whole(self, step: int, attempt: str) -> None:
        """The step is on the mirror."""
        self._given.pop(step, None)
        self._sent[step] = attempt

    def leave(self, step: int, attempt: str) -> None:
        """This save cannot be copied, now or later."""
        self._given.pop(step, None)
        self._left[step] = attempt

    def failed(self, now: float, *, spread: float = 1.0) -> float:
        """Copying failed for now; how long nothing is tried. `spread` keeps ranks from coming back as one."""
        wait_s = min(LONGEST_S, RETRY_S * 2.0 ** min(self._failures, 16)) * spread
        self._failures += 1
        self._retry_at = now + wait_s
        return wait_s

    def worked(self) -> None:
        """Something was copied: the mirror is there."""
        self._failures = 0
        self._retry_at = 0.0

    def end(self) -> None:
        """The run is over: its newest step is due too, whatever `every` says, and none that comes later."""
        if self._last is None:
            self._last = max(self._local, default=-1)

    # ---- what is next

    def has(self, step: int, attempt: str) -> bool:
        """Whether this save is committed here."""
        return self._local.get(step) == attempt

    def wants(self, step: int, attempt: str) -> bool:
        """Whether this save is on the mirror, or is going to be."""
        return step in self._wanted() and self._left.get(step) != attempt

    def _wanted(self) -> set[int]:
        found = wanted(self._local, self._sent, self._every, self._most)
        if self._last is not None:
            found = {step for step in found if step <= self._last}
            found |= {self._last} & set(self._local)
        return found

    def due(self) -> list[int]:
        """The steps of which this rank still has parts to copy, in that order: the newest first."""
        return sorted(
            (
                step
                for step in self._wanted()
                if self._local[step]
                not in (self._sent.get(step), self._left.get(step), self._given_attempt(step))
            ),
            reverse=True,
        )

    def _given_attempt(self, step: int) -> str | None:
        found = self._given.get(step)
        return found.attempt if found is not None else None

    @property
    def busy(self) -> set[int]:
        """The steps that are due or under way."""
        return {*self.due(), *self._given}

    @property
    def open(self) -> list[int]:
        """The steps that this rank must not end without: due ones, and of rank 0 those not whole yet."""
        return sorted({*self.due(), *(self._given if self._leads else ())})

    def next(self, now: float) -> Send | Look | Rest:
        """What to do at this moment."""
        due = self.due()
        looks = sorted(self._given.items(), key=lambda item: item[1].look_at)
        if not due and not looks:
            return Rest(None)
        if now < self._retry_at:
            return Rest(self._retry_at - now)
        if due:
            return Send(due[0], self._local[due[0]])
        step, given = looks[0]
        if given.look_at > now:
            return Rest(given.look_at - now)
        return Look(step, given.attempt)
