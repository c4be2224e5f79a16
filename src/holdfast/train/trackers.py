"""Where else metrics go: anything with `log` and `close`. One that is down or slow holds up no step.

Each tracker has a thread of its own, and a queue before it that holds so many steps and no more. While it
fails, it is tried again now and then; what it missed meanwhile comes after, as far as the queue goes back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol, final, runtime_checkable

from holdfast.errors import UsageError
from holdfast.train.problems import Problem
from holdfast.train.references import loaded, reference_problems

log = logging.getLogger("holdfast.train")

_MOST: Final = 10_000
"""Steps that wait for a tracker that is away; of more, the oldest go."""
_FIRST_S: Final = 30.0
_LAST_S: Final = 10.0
_PAUSES_S: Final = (1.0, 60.0)
"""Before the second try, and at most: each pause is twice the one before."""

_Numbers = Mapping[str, float]


@runtime_checkable
class Tracker(Protocol):
    """A place for metrics, such as a dashboard. Called by the leading worker alone, from one thread."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step; after an error, the same ones are given again later."""
        ...

    def close(self) -> None:
        """The run, or this worker's part in it, is over."""
        ...


@final
class Trackers:
    """Several trackers as one, which never fails and never waits."""

    def __init__(self, posts: Iterable[Post] = ()) -> None:
        self._posts = list(posts)

    def log(self, step: int, values: _Numbers) -> None:
        """Give the numbers to all."""
        for post in self._posts:
            post.put(step, values)

    def close(self) -> None:
        """Close all. Blocks: until they have what was given to them, up to 10 s for all together."""
        deadline = time.monotonic() + _LAST_S
        for post in self._posts:
            post.end()
        for post in self._posts:
            post.wait(max(0.0, deadline - time.monotonic()))
        self._posts.clear()


@final
class Post:
    """One tracker behind a queue and a thread. It is made by `make` when the first numbers come, or by
    `begin`."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        *,
        most: int = _MOST,
        pauses_s: tuple[float, float] = _PAUSES_S,
    ) -> None:
        self._name, self._make, self._most, self._pauses_s = name, make, most, pauses_s
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, dict[str, float]]] = deque()
        self._lost = 0
        self._failures = 0
        self._ending = False
        self._error: Exception | None = None
        self._tried = threading.Event()
        self._tracker: Tracker | None = None
        # It may hang in anybody's code, and must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)

    def begin(self, timeout_s: float) -> Exception | None:
        """Make the tracker now; what came of the first try: None, if it is made or takes its time.

        Blocks: up to `timeout_s`.
        """
        self._thread.start()
        if not self._tried.wait(timeout_s):
            log.warning("the tracker %s is not there after %.0f s; training begins", self._name, timeout_s)
        return self._error

    def put(self, step: int, values: _Numbers) -> None:
        """Have the numbers of a step delivered. Does not wait."""
        with self._changed:
            if len(self._waiting) >= self._most:
                self._waiting.popleft()
                self._lost += 1
            self._waiting.append((step, dict(values)))
            self._changed.notify()
        if self._thread.ident is None:
            self._thread.start()

    def end(self) -> None:
        """Deliver what waits; where that fails, with one try that begins after this, and then no more."""
        with self._changed:
            self._ending = True
            self._changed.notify()

    def wait(self, timeout_s: float) -> None:
        """Wait until all is delivered or given up; one that takes longer than `timeout_s` is left behind."""
        if self._thread.ident is None:
            return
        self._thread.join(timeout_s)
        left = self._lost + len(self._waiting)
        if self._thread.is_alive():
            log.warning("the tracker %s has not ended, and is left behind", self._name)
        if left:
            log.warning("the tracker %s did not get the metrics of %d steps", self._name, left)

    # ---- on the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                last = self._ending
            try:
                if self._tracker is None:
                    self._tracker = self._make()
                self._tried.set()
                self._deliver(self._tracker)
                self._tracker.close()
                return
            except (Exception, SystemExit) as error:
                told = error if isinstance(error, Exception) else RuntimeError(f"it exits: {error}")
                self._pause(told)
                if last:
                    return

    def _deliver(self, tracker: Tracker) -> None:
        """Give the numbers to the tracker as they come. Returns when this is to end and nothing waits."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ending)
                if not self._waiting:
                    return
                step, values = self._waiting.popleft()
            try:
                tracker.log(step, values)
            except BaseException:
                with self._changed:
                    if len(self._waiting) < self._most:
                        self._waiting.appendleft((step, values))
                    else:
                        self._lost += 1
                raise
            if self._failures:
                log.warning("the tracker %s is back after %d failures", self._name, self._failures)
                self._failures = 0

    def _pause(self, error: Exception) -> None:
        """Wait before the next try, unless this is to end; tells of the first failure in a row."""
        if not self._failures:
            log.warning(
                "the tracker %s failed and is tried again now and then; training goes on: %s",
                self._name,
                error.message if isinstance(error, UsageError) else _told(error),
            )
        if not self._tried.is_set():  # told before whoever waits in `begin` goes on
            self._error = error
            self._tried.set()
        first, most = self._pauses_s
        pause_s = min(most, first * 2 ** min(self._failures, 16))
        self._failures += 1
        with self._changed:
            self._changed.wait_for(lambda: self._ending, pause_s)


def tracker_problems(names: Iterable[str]) -> list[Problem]:
    """Names that can make no tracker, as far as that shows without running anybody's code."""
    without = "train without: log.trackers="
    return [one for name in names for one in reference_problems("log.trackers", name, without=without)]


def named(names: Iterable[str], *, refuse: bool = False) -> Trackers:
    """The trackers that names make.

    With `refuse`, for a run that begins, they are made now, and mistakes are told: one that only cannot be
    reached is none. Blocks: then, until they are made, up to 30 s each. Fails: UsageError, with `refuse`.
    """
    posts = [Post(name, lambda name=name: _made(name)) for name in names]  # type: ignore[misc]
    for post in posts if refuse else ():
        error = post.begin(_FIRST_S)
        if error is not None and not isinstance(error.__cause__, OSError):
            Trackers(posts).close()
            raise error
    return Trackers(posts)


def _made(name: str) -> Tracker:
    """The tracker of a name. Fails: UsageError, from what was raised."""
    try:
        factory = loaded(name)
    except UsageError as error:
        raise UsageError(f"log.trackers: {error.message}", hint=error.hint) from None
    except Exception as error:  # a module may raise anything
        raise UsageError(
            f"log.trackers: {name!r} cannot be had: {_told(error)}",
            hint="name a function without arguments in an importable module: my_project.tracking:make",
        ) from error
    try:
        made: object = factory()
    except Exception as error:  # so may a function
        raise UsageError(
            f"log.trackers: {name!r} failed: {_told(error)}",
            hint="it is called without arguments; log.trackers= trains without it",
        ) from error
    if not isinstance(made, Tracker):
        raise UsageError(
            f"log.trackers: {name!r} gave a {type(made).__name__}",
            hint="a tracker has log(step, values) and close()",
        )
    return made


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
