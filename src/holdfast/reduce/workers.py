"""Threads that fold one lane at a time, beside the caller."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from typing import Final, final

from holdfast.clock import Deadline
from holdfast.reduce.adder import Scratch, quiet
from holdfast.reduce.folding import Fold
from holdfast.reduce.leaves import Leaf, read

MAX_THREADS: Final = 8
"""Chosen, not measured: more of them would wait for memory, which the lanes want too."""
END_S: Final = 5.0
"""How long the end of a reducer, or of the program, waits for a lane that is being computed."""
_IDLE_S: Final = 60.0
_Act = Callable[[Scratch], None]


def default_threads() -> int:
    """The cores that this process may use, NPROC where it is set to fewer, MAX_THREADS at most."""
    cores = len(os.sched_getaffinity(0))
    pinned = os.environ.get("NPROC", "")
    return max(1, min(cores, int(pinned) if pinned.isdecimal() else cores, MAX_THREADS))


@final
class _Job:
    """A lane that is folded: one thread brings its arrays, in order; every other folds chunks that are here.

    Everything but what `next_act` gives out is done with the lock held.
    """

    def __init__(
        self,
        fold: Fold,
        leaves: Sequence[Leaf],
        done: Callable[[Fold], None],
        failed: Callable[[Fold], None],
        lock: threading.Condition,
    ) -> None:
        self.fold = fold
        self.given_up = False
        self.error: BaseException | None = None
        self.running = 0
        self.over = False
        self._leaves: list[Leaf | None] = [*leaves]
        self._done, self._failed = done, failed
        chunks = fold.layout.chunks
        self._order = sorted(range(len(chunks)), key=lambda number: chunks[number].num_entries)
        self._begun = 0
        self._num_here = 0
        self._brought = self._ending = False
        self._lock = lock

    @property
    def stops(self) -> bool:
        return self.given_up or self.error is not None

    def next_act(self) -> _Act | None:
        """What a thread can do now; None: it has to wait for others."""
        if not self.stops:
            if not self._brought:
                self._brought = True
                return self._bring
            if self._ready():
                number = self._order[self._begun]
                self._begun += 1
                return lambda scratch: self.fold.fold(number, scratch)
            if self._begun < len(self._order):
                return None
        if self.running or self._ending:
            return None
        self._ending = True
        return self._end

    def _ready(self) -> bool:
        if self._begun == len(self._order):
            return False
        return self.fold.layout.chunks[self._order[self._begun]].num_entries <= self._num_here

    def _bring(self, scratch: Scratch) -> None:
        """Blocks: until all arrays are computed and in host memory."""
        for at in range(len(self._leaves)):
            # Held by nothing else: what lies on a device is freed as soon as it is here.
            leaf, self._leaves[at] = self._leaves[at], None
            assert leaf is not None
            self.fold.bring((read(leaf),))
            del leaf
            with self._lock:
                self._num_here = at + 1
                if self.stops:
                    return
                if self._ready():
                    self._lock.notify_all()

    def _end(self, scratch: Scratch) -> None:
        """The last act, by the last thread."""
        self.over = True
        (self._failed if self.stops else self._done)(self.fold)


@final
class Workers:
    """They are started with the first lane and end with `close`. One thread at a time calls it."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads, self._name = num_threads, name
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._job: _Job | None = None
        self._error: BaseException | None = None
        self._closed = False

    @property
    def lane(self) -> int | None:
        """The lane that is being folded."""
        job = self._job
        return None if job is None else job.fold.lane

    def hire(self) -> None:
        """Start the threads, if they are not there. Fails: RuntimeError where the system has no more."""
        if not self._threads:
            # A thread that comes back from a device into an interpreter that has ended can end it badly.
            atexit.register(self.close)
        while len(self._threads) < self._num_threads:
            name = f"{self._name}-fold-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def start(
        self,
        fold: Fold,
        leaves: Sequence[Leaf],
        done: Callable[[Fold], None],
        failed: Callable[[Fold], None],
    ) -> None:
        """Begin to fold a lane, when none is being folded after `hire`.

        In the end one of them calls `done`, or `failed` if it failed or was given up.
        """
        with self._changed:
            assert self._job is None
            self._job = _Job(fold, leaves, done, failed, self._changed)
            self._changed.notify_all()

    def idle(self, timeout_s: float) -> bool:
        """Whether nothing is being folded. Blocks: until it is so, `timeout_s` at most."""
        with self._changed:
            return self._changed.wait_for(lambda: self._job is None, timeout_s)

    def error(self) -> BaseException | None:
        """What the last lane failed with; told once."""
        found, self._error = self._error, None
        return found

    def give_up(self) -> None:
        """What is being folded is not wanted any more: it ends with the chunk or array at hand."""
        with self._changed:
            if self._job is not None:
                self._job.given_up = True
                self._changed.notify_all()

    def close(self) -> None:
        """End the threads. Blocks: END_S at most; one that waits for a device ends when it answers."""
        atexit.unregister(self.close)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.give_up()
        deadline = Deadline(END_S)
        for thread in self._threads:
            thread.join(deadline.remaining())

    # ---- the threads

    def _work(self) -> None:
        scratch = Scratch()
        with quiet():
            while (found := self._next()) is not None:
                job, act = found
                error: BaseException | None = None
                try:
                    act(scratch)
                except BaseException as caught:  # whatever it is, the caller is told, and nobody else
                    error = caught
                self._left(job, error)
                del found, job, act, error  # no array is held while there is nothing to do

    def _next(self) -> tuple[_Job, _Act] | None:
        """Blocks: until there is something to do; None: never again."""
        with self._changed:
            while True:
                job = self._job
                if job is None and self._closed:
                    return None
                act = None if job is None else job.next_act()
                if job is not None and act is not None:
                    job.running += 1
                    return job, act
                del job, act
                self._changed.wait(_IDLE_S)

    def _left(self, job: _Job, error: BaseException | None) -> None:
        with self._changed:
            job.running -= 1
            if error is not None and job.error is None:
                error.add_note(f"while lane {job.fold.lane} was folded, beside what the program did")
                job.error = error
            if job.over:
                self._error = job.error  # before the other: who sees no lane looks for an error
                self._job = None
                self._changed.notify_all()
