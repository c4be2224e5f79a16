"""A second place for the steps of a folder: what to have there, what stays there, and what is read from it.

The vault does the copying (`holdfast.vault.mirror`); here is the trainer's side. Loads read from the nearest
place that has a block right: the folder, its copies, the mirror.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Literal, final

from holdfast import journal
from holdfast.checkpoint import retention, upkeep
from holdfast.checkpoint.steps import StepInfo, committed_steps, readable_steps, step_info
from holdfast.clock import Deadline
from holdfast.errors import (
    DeadlineError,
    FormatError,
    HoldfastError,
    MirrorError,
    UsageError,
)
from holdfast.storage import Store, StoreOptions, opened
from holdfast.vault import Crew, MirrorTo, Records, mirrors_of, wanted

log = logging.getLogger("holdfast.checkpoint")

LOOK_S: Final = 10.0
"""For so long a place that is only to be looked into is asked again; a start must not wait for a lost one."""
_UPKEEP_S: Final = 10.0
"""How long the end of a run waits for old steps to be removed from a mirror; the next run does it too."""


@final
@dataclass(frozen=True, slots=True)
class Mirror:
    """A second place for the steps of a folder, filled in the background.

        Checkpointer("runs/a/ckpt", mirror=Mirror("s3://bucket/a", every=1000, keep=5))

    Args:
        place: a folder or an object store's URL; each run has its own.
        every: which steps go there: the first at or after each multiple of it. The last step of a run does in
            any case.
        keep: which of them stay there, as for `Checkpointer`.
        rate: bytes that are sent in a second at most; no limit if None.
        drain_s: how long the end of the run waits for steps that are not there yet.
        hold_local: keep a step that is to be copied in the folder until it is, whatever `Checkpointer(keep=)`
            says; a mirror that is away for long then fills the disk.
        options: how to reach an object store, where the environment does not say it.
    """

    place: str | os.PathLike[str]
    every: int = 1
    keep: int | retention.Policy | None = 3
    rate: float | None = None
    drain_s: float = 300.0
    hold_local: bool = False
    options: StoreOptions | None = None

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise UsageError(f"Mirror(every={self.every!r})", hint="a number of steps, at least 1")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise UsageError(f"Mirror(rate={self.rate!r})", hint="bytes per second, or None for no limit")
        if not 0 <= self.drain_s < math.inf:
            raise UsageError(f"Mirror(drain_s={self.drain_s!r})", hint="a number of seconds")

    def opened(self) -> Store:
        """The store there. Fails: UsageError for a place that is none."""
        return opened(self.place, self.options)

    def glanced(self) -> Store:
        """The same store, for a look that gives up soon."""
        options = self.options or StoreOptions()
        soon = replace(
            options, retry_s=min(LOOK_S, options.retry_s), timeout_s=min(LOOK_S, options.timeout_s)
        )
        return opened(self.place, soon)


@final
class Copied:
    """What became of one save on the mirror; a part of its handle."""

    def __init__(self) -> None:
        self._state: Literal["", "pending", "failing", "whole", "left"] = ""
        self._reason = ""
        self._changed = threading.Condition()

    def expect(self) -> None:
        """There is a mirror, and it will be heard of."""
        self._state = "pending"

    def tell(self, state: Literal["whole", "left", "failing"], reason: str) -> None:
        with self._changed:
            self._state, self._reason = state, reason
            self._changed.notify_all()

    def wait(self, step: int, deadline: Deadline, timeout_s: float) -> None:
        """Return once the step is on the mirror. Fails: DeadlineError, MirrorError, UsageError."""
        with self._changed:
            if not self._state:
                raise UsageError("this Checkpointer has no mirror", hint="Checkpointer(path, mirror=...)")
            while self._state in ("pending", "failing"):
                if deadline.expired() or not self._changed.wait(deadline.remaining()):
                    trouble = f"; copying fails: {self._reason}" if self._state == "failing" else ""
                    raise DeadlineError(
                        f"step {step} is not on the mirror after {timeout_s:g} s{trouble}",
                        hint="the vault goes on trying; the journal has every failure",
                    )
            if self._state == "left":
                raise MirrorError(
                    f"step {step} is not copied to the mirror: {self._reason}",
                    hint="it is committed in the folder; newer steps are copied as asked for",
                )


@final
class MirrorTier:
    """The mirror of a folder, as a trainer has it: where it is, what is held for it, what stays there."""

    def __init__(
        self,
        given: str | os.PathLike[str] | Mirror,
        store: Store,
        options: StoreOptions | None,
        note: Callable[[journal.Event], None],
    ) -> None:
        """A place alone is a mirror with defaults; `options` serve one without its own. Fails: UsageError."""
        mirror = given if isinstance(given, Mirror) else Mirror(given)
        mirror = replace(mirror, options=mirror.options or options)
        self._keep = retention.policy(mirror.keep)
        self._hold_local = mirror.hold_local
        self._folder = store
        self._note = note
        self.glance, self.store = mirror.glanced(), mirror.opened()
        """The same place twice: to look into, which gives up soon, and to read from."""
        root = self.store.root
        if root == store.root or root.startswith(f"{store.root.rstrip('/')}/"):
            raise UsageError(f"{root} is no mirror of {store.root}", hint="give it a place of its own")
        self.to = MirrorTo(
            place=root,
            every=mirror.every,
            most=self._keep.count if isinstance(self._keep, retention.Latest) else None,
            rate=mirror.rate,
            drain_s=mirror.drain_s,
            options=mirror.options,
        )
        self._known: dict[int, StepInfo] = {}
        # A mirror may be slow or away: what is tidied there must not hold up what is tidied in the folder.
        self._upkeep = Crew(1, "holdfast-mirror-upkeep")

    def held(self, steps: Collection[StepInfo]) -> set[int]:
        """The steps of the folder that retention leaves alone until they are on the mirror."""
        if not self._hold_local:
            return set()
        sent = Records(self._folder, self.to.place).sent()
        due = wanted([info.step for info in steps], sent, self.to.every, self.to.most)
        return {info.step for info in steps if info.step in due and sent.get(info.step) != info.attempt}

    def mirrored(self, step: int) -> None:
        """A step got there: remove what the policy does not keep, in the background."""
        self._upkeep.submit(self._prune, step)

    def _prune(self, fresh: int) -> None:
        try:
            pinned = {info.step for info in readable_steps(self._folder)[0] if info.pinned}
            self._look(fresh)
            infos = [replace(one, pinned=one.pinned or one.step in pinned) for one in self._known.values()]
            for step in retention.doomed(infos, self._keep, now=time.time()):
                if step == fresh:
                    continue  # of a run that went back, and whose newest steps may be no good
                upkeep.remove_step(self.store, step)
                del self._known[step]
                self._note(journal.StepPruned(step=step, place=self.store.root))
        except HoldfastError as error:
            log.warning("old steps could not be removed from the mirror (they will be next time): %s", error)

    def _look(self, fresh: int) -> None:
        """See which steps are there; manifests are read once. What cannot be read stays."""
        self._known.pop(fresh, None)
        known = self._known
        self._known = {}
        for step in committed_steps(self.store):
            with suppress(FormatError):
                self._known[step] = known.get(step) or step_info(self.store, step)

    def close(self, timeout_s: float) -> None:
        """End the upkeep; what it has not done by then, the next run does."""
        self._upkeep.close(min(timeout_s, _UPKEEP_S))


@final
class Nearest:
    """The places that have one save, nearest first. The further ones are asked only when they are needed."""

    def __init__(self, nearest: Store, further: Iterator[Store]) -> None:
        self._known = [nearest]
        self._further = further
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Store]:
        at = 0
        while (store := self._at(at)) is not None:
            yield store
            at += 1

    def _at(self, at: int) -> Store | None:
        with self._lock:
            if at == len(self._known):
                found = next(self._further, None)
                if found is None:
                    return None
                self._known.append(found)
            return self._known[at]


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """The mirrors of a folder and the steps each of them has; why one could not be asked."""

    steps: dict[str, list[int]]
    problems: dict[str, HoldfastError]

    def of(self, step: int) -> list[str]:
        """The mirrors that have a step."""
        return [place for place, steps in self.steps.items() if step in steps]


def whereabouts(store: Store) -> Whereabouts:
    """What the mirrors of a folder have."""
    found = Whereabouts({}, {})
    for place in mirrors_of(store):
        try:
            found.steps[place] = committed_steps(Mirror(place).glanced())
        except HoldfastError as error:
            found.problems[place] = error
    return found
