"""Finding a step that can be loaded: the newest that verifies, in a folder and its copies."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, final

from holdfast import journal
from holdfast.checkpoint.loading import LoadOptions, LoadReport, StepLoad
from holdfast.checkpoint.steps import committed_steps, step_manifest
from holdfast.checkpoint.tiers import Nearest
from holdfast.checkpoint.upkeep import in_flight
from holdfast.clock import Deadline
from holdfast.errors import CorruptError, FormatError, HoldfastError, NoCheckpointError, StorageError
from holdfast.format import Manifest
from holdfast.storage import Store, is_trouble

log = logging.getLogger("holdfast.checkpoint")

_POLL_S: Final = 0.02


@final
class StepSearch:
    """One search; `report` tells afterwards what was loaded."""

    def __init__(
        self,
        stores: Sequence[Store],
        *,
        mirror: tuple[Store, Store] | None = None,
        note: Callable[[journal.Event], None],
        rank: int,
        world: int,
    ) -> None:
        """`stores` are the folder and its copies. `mirror` is one store twice: to look into, and to read."""
        self._stores = stores
        self._glances = () if mirror is None else mirror[:1]
        self._places = (*stores, *(() if mirror is None else mirror[1:]))
        self._note = note
        self._rank = rank
        self._world = world
        self.report: LoadReport | None = None
        self.skipped: set[int] = set()
        """Newer steps that could not be loaded."""
        self.silent: HoldfastError | None = None
        """Why a place other than the folder could not be asked what it has."""
        self._trouble: HoldfastError | None = None
        """Of a place that may answer better another time."""

    def steps(self) -> list[int]:
        """The committed steps, ascending, in all places that answer. Fails: StorageError for the nearest."""
        found = set(committed_steps(self._stores[0]))
        for place in (*self._stores[1:], *self._glances):
            try:
                found.update(committed_steps(place))
            except HoldfastError as error:
                self.silent = self._trouble = self.silent or error
                log.warning("%s is left out, it does not answer: %s", place.root, error.message)
        return sorted(found)

    def load_newest(self, into: Any, options: LoadOptions) -> Any:
        """The newest step that is complete and verifies.

        Fails: NoCheckpointError, listing what was tried; StorageError, if that may be for want of an answer.
        """
        tried: list[str] = []
        for candidate in reversed(self.steps()):
            try:
                return self.load(candidate, into, options)
            except (FormatError, StorageError) as error:
                tried.append(f"step {candidate}: {error.message}")
                self.skipped.add(candidate)
                self._note(journal.StepSkipped(step=candidate, reason=error.message))
                log.warning("step %d cannot be loaded, trying an earlier one", candidate)
        root = self._stores[0].root
        message = f"no step in {root} can be loaded" + "".join(f"\n  - {line}" for line in tried)
        if tried and self._trouble is not None:
            raise StorageError(
                message, path=root, hint=f"try again when the store answers: {self._trouble.message}"
            )
        raise NoCheckpointError(
            message,
            hint="`holdfast ckpt ls` shows what is there"
            if tried
            else "nothing has been saved there yet; check the path",
        )

    def load(self, step: int, into: Any, options: LoadOptions) -> Any:
        """Exactly this step, from the first of its saves that can be loaded. Fails: CorruptError.

        Further places are asked only where the nearer ones do not do.
        """
        absent: HoldfastError | None = None
        problem: HoldfastError | None = None
        tried: list[Manifest] = []
        for at, store in enumerate(self._places):
            try:
                manifest = step_manifest(store, step)
            except HoldfastError as error:
                absent = absent or error
                self._met(store, error)
                if not isinstance(error, NoCheckpointError):
                    log.warning("step %d in %s: %s", step, store.root, error.message)
                continue
            if manifest in tried:
                continue
            tried.append(manifest)
            if at > 0:
                log.warning("step %d: reading the copy in %s instead", step, store.root)
            holders = Nearest(store, self._holding(manifest, self._places[at + 1 :]))
            try:
                return self._load_save(step, manifest, holders, into, options)
            except (FormatError, StorageError) as error:
                problem = problem or error
                self._met(store, error)
                # Bad blocks were told when they were met.
                level = logging.INFO if isinstance(error, CorruptError) else logging.WARNING
                log.log(level, "save %s of step %d cannot be loaded: %s", manifest.save, step, error.message)
        found = problem or absent
        assert found is not None
        raise found

    def _holding(self, wanted: Manifest, places: Sequence[Store]) -> Iterator[Store]:
        """Those of the places that have exactly this save."""
        for place in places:
            try:
                same = step_manifest(place, wanted.save.step) == wanted
            except HoldfastError as error:
                self._met(place, error)
                log.warning("%s: no copy of step %d: %s", place.root, wanted.save.step, error.message)
                continue
            if same:
                yield place

    def _met(self, place: Store, error: HoldfastError) -> None:
        if is_trouble(place, error):
            self._trouble = self._trouble or error

    def _load_save(
        self, step: int, manifest: Manifest, stores: Iterable[Store], into: Any, options: LoadOptions
    ) -> Any:
        started = time.monotonic()
        self._note(journal.LoadStarted(step=step))
        work = StepLoad(manifest, into, options, rank=self._rank, world=self._world)
        tree, pipeline = work.run(stores, self._bad_block)
        seconds = time.monotonic() - started
        self.report = LoadReport(
            step=step,
            nbytes=work.nbytes,
            bytes_read=pipeline.stats.bytes_read,
            seconds=seconds,
            hash_s=pipeline.stats.hash_s,
            blocks=pipeline.stats.blocks,
            repaired=pipeline.stats.repaired,
        )
        if pipeline.stats.repaired:
            log.warning("step %d: %d blocks were read from another place", step, pipeline.stats.repaired)
        self._note(journal.LoadFinished(step=step, bytes=work.nbytes, seconds=seconds))
        return tree

    def _bad_block(self, error: CorruptError, root: str) -> None:
        for place in self._places:
            if place.root == root and isinstance(error.__cause__, HoldfastError):
                self._met(place, error.__cause__)
        log.warning("bad block in %s: %s", root, error.message)
        self._note(
            journal.BlockBad(
                file=os.path.join(root, error.file or ""),
                block=error.block or 0,
                arrays=error.arrays,
                reason=error.message,
            )
        )

    def await_writers(self, timeout_s: float) -> None:
        """Wait for saves that a vault is still finishing after its trainer died."""
        deadline = Deadline(timeout_s)
        while busy := in_flight(self._stores[0]):
            if deadline.expired():
                log.warning("step %s is still being written; not waiting for it any longer", busy)
                return
            time.sleep(max(_POLL_S, self._stores[0].poll_s))
