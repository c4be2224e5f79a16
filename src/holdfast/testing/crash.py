"""The crash checker: no crash at any point of a save may lose, tear or mix a checkpoint.

    log = record(second_save, RecordingFiles(folder))
    tally = check_crashes(log, limit=40, seed=0)
    assert not tally.bad

After every operation of the log, `DiskModel` gives the states that a crash there may leave. On each of them
the real code runs unchanged: every committed step must verify and hold exactly one save's values, `load` must
return the newest of them, what was promised as durable must be there, and a new start must clean up, save and
load. A bad state is found again from the log, the point, the limit, the seed and its number.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from holdfast.arrays import decode_scalar, dtype, unflatten
from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.steps import committed_steps, step_manifest
from holdfast.errors import HoldfastError, NoCheckpointError, StepExistsError
from holdfast.format import (
    MANIFEST,
    parse_file_name,
    parse_step_folder,
    read_index,
    read_manifest,
    step_folder,
    verify_step,
)
from holdfast.storage import LocalStore
from holdfast.testing.disk import DiskModel
from holdfast.testing.memory_disk import MOUNT, ROOT, Image, MemoryFiles
from holdfast.testing.recording import Op
from holdfast.testing.scenario import FOLDER, Promise, Tree, same, sample_tree

_PATH = f"{MOUNT}/{FOLDER}"


@dataclass(frozen=True, slots=True)
class BadState:
    """A state that breaks a promise, and how to find it again."""

    point: int
    number: int
    problem: str
    after: str

    def __str__(self) -> str:
        return f"point {self.point} (after {self.after}), state {self.number}: {self.problem}"


@dataclass(slots=True)
class Tally:
    """What a check has covered."""

    points: int = 0
    states: int = 0
    loads: int = 0
    restarts: int = 0
    bad: list[BadState] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Count another check in."""
        self.points += other.points
        self.states += other.states
        self.loads += other.loads
        self.restarts += other.restarts
        self.bad += other.bad

    def __str__(self) -> str:
        counts = (
            f"{self.states} states at {self.points} points, {self.loads} with Checkpointer.load, "
            f"{self.restarts} started on again, {len(self.bad)} bad"
        )
        return "\n  ".join([counts, *map(str, self.bad[:10])])


def check_crashes(
    log: Sequence[Op],
    *,
    limit: int,
    seed: int = 0,
    load_every: int = 5,
    restart_every: int = 25,
    points: Iterable[int] | None = None,
    image: Image | None = None,
    promise: Promise | None = None,
    most_bad: int = 10,
) -> Tally:
    """Check the states after every operation (or at `points`), up to `limit` of them each.

    Only distinct states are checked and counted. Every step of each is verified and its values compared; one
    state in `load_every` also goes through `Checkpointer.load`, and one in `restart_every` is started on
    again. `image` and `promise` are what stood before the log began.
    """
    model = DiskModel(log, image=image)
    tally = Tally()
    steps = StepCache()
    seen: set[int] = set()
    with quiet():
        for point in range(len(log) + 1) if points is None else points:
            model.seek(point)
            stands = Promise.at(log, point, promise)
            tally.points += 1
            for number, state in enumerate(model.states(limit, seed)):
                key = hash((stands.key, tuple(sorted(state.content().items()))))
                if key in seen:
                    continue
                seen.add(key)
                tally.states += 1
                rng = random.Random(f"{seed}/{point}/{number}")
                problem = steps.problem(state, stands)
                if problem is None and rng.random() * load_every < 1:
                    tally.loads += 1
                    problem = state_problem(state, stands)
                if problem is None and rng.random() * restart_every < 1:
                    tally.restarts += 1
                    problem = restart_problem(state, stands)
                if problem is not None:
                    after = str(log[point - 1]) if point else "nothing"
                    tally.bad.append(BadState(point, number, problem, after))
                    if len(tally.bad) >= most_bad:
                        return tally
    return tally


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings in the log about states that are meant to be strange."""
    log = logging.getLogger("holdfast")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


@final
class StepCache:
    """Judges states by their step folders, each distinct content of a folder once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str | None, Tree | None]] = {}

    def problem(self, state: Image, promise: Promise) -> str | None:
        """What is wrong with a state: as `state_problem`, without `Checkpointer.load`."""
        store = LocalStore(_PATH, files=MemoryFiles(state))
        good: set[int] = set()
        for step in committed_steps(store):
            broken, tree = self._step(state, store, step)
            if broken is None:
                good.add(step)
                if problem := _value_problem(tree, step, promise):
                    return problem
            elif step not in promise.damaged:
                return f"step {step} is committed and does not verify: {broken}"
        return _absence(good, promise)

    def _step(self, state: Image, store: LocalStore, step: int) -> tuple[str | None, Tree | None]:
        folder = step_folder(step)
        inside = state.folders[state.folders[state.folders[ROOT][FOLDER]][folder]]
        key = hash((step, tuple((name, state.files.get(ino)) for name, ino in sorted(inside.items()))))
        if key not in self._known:
            problem = next(verify_step(store, folder), None)
            self._known[key] = (problem.message, None) if problem else (None, read_tree(store, step))
        return self._known[key]


def read_tree(store: LocalStore, step: int) -> Tree:
    """The tree of a step, read without the loader: a second opinion on what lies on disk."""
    manifest = step_manifest(store, step)
    folder = step_folder(step)
    arrays = {entry.name: np.empty(entry.shape, dtype(entry.dtype).numpy) for entry in manifest.arrays}
    for entry in manifest.parts:
        index = read_index(store, folder, manifest, entry.part)
        for piece in index.slices:
            with closing(store.open_part(folder, index.files[piece.file].name, direct=False)) as part:
                data = part.read(piece.offset, piece.nbytes)
            into = arrays[piece.name]
            box = tuple(slice(a, b) for a, b in zip(piece.start, piece.stop, strict=True))
            into[box] = np.frombuffer(data, into.dtype).reshape(piece.shape)
    leaves: dict[str, Any] = {**arrays}
    leaves |= {entry.name: decode_scalar(entry.type, entry.value) for entry in manifest.scalars}
    tree: Tree = unflatten(leaves)
    return tree


def state_problem(state: Image, promise: Promise) -> str | None:
    """What is wrong with a state, None if it keeps its promises."""
    return disk_problem(Disk(MemoryFiles(state)), promise)


def _absence(good: set[int], promise: Promise) -> str | None:
    for allowed in promise.present:
        if not allowed & good:
            return f"one of steps {sorted(allowed)} was durable; there are only {sorted(good)}"
    return None


@final
class Disk:
    """A checkpoint folder as a fresh process finds it."""

    def __init__(self, files: MemoryFiles, path: str = _PATH) -> None:
        self.files = files
        self.store = LocalStore(path, files=files)
        self.checkpointer = Checkpointer(
            path, writer="thread", rank=0, world=1, files=files, journal=False, threads=1, keep=None
        )

    def verified(self) -> tuple[list[int], list[int]]:
        """The committed steps that verify, and those that do not."""
        good: list[int] = []
        bad: list[int] = []
        for step in self.checkpointer.steps():
            (bad if next(verify_step(self.store, step_folder(step)), None) else good).append(step)
        return good, bad


def disk_problem(disk: Disk, promise: Promise) -> str | None:
    """What is wrong with a folder, None if it keeps its promises."""
    good, bad = disk.verified()
    for step in bad:
        if step not in promise.damaged:
            problems = list(verify_step(disk.store, step_folder(step)))
            return f"step {step} is committed and does not verify: {problems[0].message}"
    if problem := _absence(set(good), promise):
        return problem
    for step in good[:-1]:
        if problem := _load_problem(disk, step, promise):
            return problem
    try:
        tree = disk.checkpointer.load()
    except NoCheckpointError:
        return f"load finds nothing, verify finds {good}" if good else None
    except HoldfastError as error:
        return f"load fails: {error.message}"
    report = disk.checkpointer.last_load
    loaded = report.step if report is not None else -1
    if not good or loaded != good[-1]:
        return f"load gives step {loaded}, verify finds {good}"
    return _value_problem(tree, loaded, promise)


def _load_problem(disk: Disk, step: int, promise: Promise) -> str | None:
    try:
        tree = disk.checkpointer.load(step=step)
    except HoldfastError as error:
        return f"step {step} verifies and does not load: {error.message}"
    return _value_problem(tree, step, promise)


def _value_problem(tree: object, step: int, promise: Promise) -> str | None:
    versions = sorted(promise.versions.get(step, ()))
    if any(same(tree, sample_tree(step, version)) for version in versions):
        return None
    return f"step {step} holds the values of none of its saves (versions {versions})"


# ---- a new start


def restart_problem(state: Image, promise: Promise) -> str | None:
    """What goes wrong when a run starts again on a state, None if nothing does.

    The run redoes the step it was at, saves the next one, and leaves nothing behind that belongs to no step.
    """
    files = MemoryFiles(state, writable=True)
    before, _ = Disk(files).verified()
    redone = max(promise.versions, default=1)
    with Checkpointer(
        _PATH, writer="thread", rank=0, world=1, files=files, journal=False, threads=1, keep=None
    ) as checkpointer:
        for step, expected in ((redone, redone in before), (redone + 1, False)):
            handle = checkpointer.save(step, sample_tree(step, 99))
            try:
                handle.durable(30.0)
            except StepExistsError:
                if not expected:
                    return f"a restart cannot save step {step}"
            except HoldfastError as error:
                return f"a restart cannot save step {step}: {error.message}"
            else:
                if expected:
                    return f"a restart has replaced the good step {step}"
                promise = promise.copy()
                promise.take("began", step, 99)
                promise.take("durable", step, 99)
    # The lock files and everything else are as a later process finds them.
    disk = Disk(files)
    return disk_problem(disk, promise) or next(leftovers(disk.store), None)


def leftovers(store: LocalStore) -> Iterator[str]:
    """What lies in a checkpoint folder and belongs to no committed step."""
    for name in store.names():
        if name == ".holdfast":
            continue
        if parse_step_folder(name) is None or not store.exists(name, MANIFEST):
            yield f"{name} is left over"
            continue
        attempt = read_manifest(store, name).save.attempt
        for file in store.names(name):
            parsed = parse_file_name(file)
            if parsed is None or (parsed.kind != "manifest" and parsed.attempt != attempt):
                yield f"{name}/{file} is left over"
    yield from _work_leftovers(store)


def _work_leftovers(store: LocalStore) -> Iterator[str]:
    for name in store.names(".holdfast"):
        if name.startswith((".tmp-", "intent-")):
            yield f".holdfast/{name} is left over"
    kept: set[int] = set()
    for name in store.names(".holdfast", "recycled"):
        parsed = parse_file_name(name)
        if parsed is None or parsed.part in kept:
            yield f".holdfast/recycled/{name} is left over"
        else:
            kept.add(parsed.part)
    for name in store.names(".holdfast", "agreement"):
        if name != "hello":
            yield f".holdfast/agreement/{name} is left over"
    for name in store.names(".holdfast", "pins"):
        if name.startswith(".tmp-"):
            yield f".holdfast/pins/{name} is left over"
