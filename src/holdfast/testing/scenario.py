"""Saves recorded for the crash checker, and what must hold after a crash at any point of them.

A scenario drives `Checkpointer` on a `RecordingFiles` through a `Script`, which notes in the log what was
promised when. `Promise` reads the notes back: which steps must be there, and what each of them may hold.
"""

from __future__ import annotations

import itertools
import os
import random
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, final
from unittest import mock

import numpy as np

from holdfast.checkpoint import Checkpointer, SaveHandle
from holdfast.errors import HoldfastError
from holdfast.testing.recording import Op, RecordingFiles

Tree = dict[str, Any]
FOLDER = "ckpt"
"""The checkpoint folder of every scenario, below the base of its recording."""


@cache
def sample_tree(step: int, version: int = 0) -> Tree:
    """A small state of several pages; no two versions share a byte where it counts."""
    rng = np.random.default_rng([step, version])
    return {
        "w": rng.integers(0, 1 << 32, 1700, np.uint32).view(np.float32),
        "opt": {"m": rng.integers(1, 255, 3001, np.uint8), "count": np.int64(1000 * step + version)},
        "step": step,
        "version": version,
    }


def same(one: Any, two: Any) -> bool:
    """Whether two trees of dicts, numpy arrays and scalars are equal to the last bit."""
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, np.ndarray | np.generic) or isinstance(two, np.ndarray | np.generic):
        left, right = np.asarray(one), np.asarray(two)
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    return type(one) is type(two) and bool(one == two)


@final
class Script:
    """What a scenario can do; every call is on record."""

    def __init__(self, files: RecordingFiles) -> None:
        self.files = files
        self.path = os.path.join(files.base, FOLDER)

    @contextmanager
    def ranks(self, world: int = 1, **options: Any) -> Iterator[Ranks]:
        """`world` ranks, each with its checkpointer, as after a start of the run."""
        settings: dict[str, Any] = {"keep": None, "writer": "thread", "threads": 1, "deadline_s": 30.0}
        with ExitStack() as stack:
            opened = [
                Checkpointer(
                    self.path, rank=r, world=world, files=self.files, journal=False, **settings | options
                )
                for r in range(world)
            ]
            for checkpointer in opened:
                stack.enter_context(checkpointer)
            pool = stack.enter_context(ThreadPoolExecutor(world))
            yield Ranks(self.files, opened, pool)

    def damage(self, step: int, name: str, offset: int) -> None:
        """Flip a byte of a file, for good; afterwards the step may be anything but silently wrong."""
        path = os.path.join(self.path, name)
        self.files.mark("damaged", step)
        with self.files.opened(self.files.create(path)) as fd:
            byte = bytearray(1)
            self.files.read_at(fd, byte, offset)
            self.files.write_at(fd, bytes([byte[0] ^ 0x40]), offset)
            self.files.sync(fd)


@final
class Ranks:
    """The ranks of one start of a run."""

    def __init__(
        self, files: RecordingFiles, checkpointers: Sequence[Checkpointer], pool: ThreadPoolExecutor
    ) -> None:
        self.checkpointers = checkpointers
        self._files = files
        self._pool = pool

    def save(self, step: int, version: int = 0, *, prunes: Iterable[int] = (), **options: Any) -> bool:
        """Save on all ranks and wait for all; whether it became durable. `prunes`: steps this may remove."""
        self._files.mark("began", step, version)
        for old in prunes:
            self._files.mark("expires", old, step)
        outcomes = list(self._pool.map(lambda c: self._save(c, step, version, options), self.checkpointers))
        return all(outcomes)

    def _save(self, checkpointer: Checkpointer, step: int, version: int, options: dict[str, Any]) -> bool:
        # So long that a manifest spans sectors which differ from save to save.
        meta = {"notes": [f"step {step} version {version}"] * 60}
        handle: SaveHandle = checkpointer.save(step, sample_tree(step, version), meta=meta, **options)
        try:
            handle.durable(60.0)
        except HoldfastError:
            return False
        # Any rank that was told so may act on it at once.
        self._files.mark("durable", step, version)
        return True

    def prune(self, *steps: int) -> None:
        """Let the retention policy remove `steps` now."""
        for step in steps:
            self._files.mark("pruned", step)
        removed = self.checkpointers[0].prune()
        assert removed == list(steps), removed


@final
class Promise:
    """What must hold of a disk after the notes taken so far."""

    def __init__(self) -> None:
        self.versions: dict[int, frozenset[int]] = {}
        self.damaged: frozenset[int] = frozenset()
        # Of each of these sets, at least one step must be there.
        self.present: tuple[frozenset[int], ...] = ()

    def copy(self) -> Promise:
        """The same promises, to take further notes in."""
        other = Promise()
        other.versions, other.damaged, other.present = dict(self.versions), self.damaged, self.present
        return other

    @staticmethod
    def at(log: Sequence[Op], point: int, before: Promise | None = None) -> Promise:
        """The promises that stand after the first `point` operations."""
        promise = Promise() if before is None else before.copy()
        for op in itertools.islice(log, point):
            if op.note is not None:
                promise.take(*op.note)
        return promise

    def take(self, what: str, step: int, version: int) -> None:
        """Take one note."""
        if what == "began":
            self.versions[step] = self.versions.get(step, frozenset()) | {version}
        elif what == "durable":
            self.versions[step] = frozenset({version})
            self.damaged -= {step}
            self.present = (*(s for s in self.present if step not in s), frozenset({step}))
        elif what == "expires":  # step may go once the step called `version` here is there
            self.present = tuple(s | {version} if step in s else s for s in self.present)
        elif what == "pruned":
            self.present = tuple(s - {step} for s in self.present if s - {step})
        elif what == "damaged":
            self.damaged |= {step}
            self.present = tuple(s - {step} for s in self.present if s - {step})

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal promises."""
        return tuple(sorted(self.versions.items())), self.damaged, self.present


Scenario = Callable[[Script], None]


def record(scenario: Scenario, files: RecordingFiles, *, seed: int = 0) -> list[Op]:
    """Run a scenario and return its log.

    Random ids are drawn from `seed` and the wall clock stands still, so that a scenario of one rank gives the
    same log every time. With several ranks the threads race: keep the log (`encode_log`) to see the same
    states again.
    """
    rng = random.Random(seed)

    def drawn() -> uuid.UUID:
        return uuid.UUID(int=rng.getrandbits(128), version=4)

    with mock.patch("uuid.uuid4", drawn), mock.patch("time.time", return_value=1_700_000_000.0):
        scenario(Script(files))
    return files.log


# ---- the scenarios


def first_save(script: Script) -> None:
    """Nothing, then a step."""
    with script.ranks() as run:
        run.save(1)


def second_save(script: Script) -> None:
    """A good step, then another."""
    with script.ranks() as run:
        run.save(1)
        run.save(2)


def pruning(script: Script) -> None:
    """Retention removes two steps, with and without keeping their files."""
    with script.ranks(keep=1, recycle=False) as run:
        run.save(1)
        run.save(2, prunes=[1])
    with script.ranks(keep=1) as run:
        run.save(3, prunes=[1, 2])


def recycling(script: Script) -> None:
    """Saves into the file of a pruned step."""
    with script.ranks(keep=2) as run:
        run.save(1)
        run.save(2)
        run.save(3, prunes=[1])
        run.checkpointers[0].close()
    with script.ranks(keep=2) as run:
        run.save(4, prunes=[2])
    with script.ranks(keep=2) as run:
        run.save(5, prunes=[3])


def overwriting(script: Script) -> None:
    """A good step replaced on request, twice."""
    with script.ranks() as run:
        run.save(1)
        run.save(1, 1, overwrite=True)
        run.save(1, 2, overwrite=True)


def replacing_damaged(script: Script) -> None:
    """A step that fails verification is replaced by a save of the same step."""
    with script.ranks() as run:
        run.save(1)
        run.save(2)
    folder = os.path.join(FOLDER, "step-00000002")
    part = next(op.path for op in script.files.log if op.path.startswith(folder) and "safetensors" in op.path)
    script.damage(2, os.path.relpath(part, FOLDER), 5000)
    with script.ranks() as run:
        run.save(2, 1)


def restarting(script: Script) -> None:
    """Three starts of a run, each cleaning up after the one before."""
    for step in (1, 2, 3):
        with script.ranks(keep=2) as run:
            run.save(step, prunes=[step - 2])


def two_ranks(script: Script) -> None:
    """Two processes save together, twice."""
    with script.ranks(2) as run:
        run.save(1)
        run.save(2)


def three_ranks(script: Script) -> None:
    """Three processes save together and replace a step."""
    with script.ranks(3) as run:
        run.save(1)
        run.save(1, 1, overwrite=True)


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        first_save,
        second_save,
        pruning,
        recycling,
        overwriting,
        replacing_damaged,
        restarting,
        two_ranks,
        three_ranks,
    )
}
"""Every built-in scenario by name."""
