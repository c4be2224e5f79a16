"""Finding a step that can be loaded: the newest that verifies, in a folder and its copies."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, final

from holdfast import journal
from holdfast.checkpoint.loading import LoadOptions, LoadReport, StepLoad
from holdfast.checkpoint.steps import step_manifest, steps_in
from holdfast.checkpoint.upkeep import in_flight
from holdfast.clock import Deadline
from holdfast.errors import CorruptError, FormatError, HoldfastError, NoCheckpointError, StorageError
from holdfast.format import Manifest
from holdfast.storage import LocalStore

log = logging.getLogger("holdfast.checkpoint")

_POLL_S: Final = 0.02


@final
class StepSearch:
    """One search; `report` tells afterwards what was loaded."""

    def __init__(
        self,
        stores: Sequence[LocalStore],
        *,
        note: Callable[[journal.Event], None],
        rank: int,
        world: int,
    ) -> None:
        self._stores = stores
        self._note = note
        self._rank = rank
        self._world = world
        self.report: LoadReport | None = None

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        return steps_in(*self._stores)

    def load_newest(self, into: Any, options: LoadOptions) -> Any:
        """The newest step that is complete and verifies. Fails: NoCheckpointError, listing what was tried."""
        tried: list[str] = []
        for candidate in reversed(self.steps()):
            try:
                return self.load(candidate, into, options)
            except (FormatError, StorageError) as error:
                tried.append(f"step {candidate}: {error.message}")
                self._note(journal.StepSkipped(step=candidate, reason=error.message))
                log.warning("step %d cannot be loaded, trying an earlier one: %s", candidate, error)
        raise NoCheckpointError(
            f"no step in {self._stores[0].root} can be loaded" + "".join(f"\n  - {line}" for line in tried),
            hint="`holdfast ckpt ls` shows what is there"
            if tried
            else "nothing has been saved there yet; check the path",
        )

    def load(self, step: int, into: Any, options: LoadOptions) -> Any:
        """Exactly this step, from the first of its saves that can be loaded. Fails: CorruptError."""
        problem: HoldfastError | None = None
        for manifest, stores in self._sources(step):
            try:
                return self._load_save(step, manifest, stores, into, options)
            except (FormatError, StorageError) as error:
                problem = problem or error
                log.warning("save %s of step %d cannot be loaded: %s", manifest.save, step, error)
        assert problem is not None
        raise problem

    def _load_save(
        self, step: int, manifest: Manifest, stores: Sequence[LocalStore], into: Any, options: LoadOptions
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
        )
        self._note(journal.LoadFinished(step=step, bytes=work.nbytes, seconds=seconds))
        return tree

    def _sources(self, step: int) -> list[tuple[Manifest, list[LocalStore]]]:
        """The saves of a step that are in this folder and its copies, each with the folders that have it."""
        found: list[tuple[Manifest, list[LocalStore]]] = []
        problems: list[HoldfastError] = []
        for store in self._stores:
            try:
                manifest = step_manifest(store, step)
            except HoldfastError as error:
                problems.append(error)
                continue
            for known, stores in found:
                if known == manifest:
                    stores.append(store)
                    break
            else:
                found.append((manifest, [store]))
        if not found:
            raise problems[0]
        if found[0][1][0] is not self._stores[0]:
            log.warning("step %d: reading a copy instead: %s", step, problems[0].message)
        return found

    def _bad_block(self, error: CorruptError, root: str) -> None:
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
            time.sleep(_POLL_S)
