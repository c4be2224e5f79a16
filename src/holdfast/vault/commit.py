"""The commit of a save: ballots, one decision, and the manifest created if absent.

Every rank votes once its part and index are durable. Whoever has seen all ballots proposes "commit", whoever
runs out of patience or failed proposes "abort"; the first proposal stands. Only after "commit" stands may the
manifest be created, and creating it is the commit. The manifest is a pure function of the ballots, so any
rank can finish for one that died.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, final

import msgspec

from holdfast import faults
from holdfast.clock import Deadline
from holdfast.coord import Agreement
from holdfast.errors import (
    AgreementError,
    FormatError,
    HoldfastError,
    MissingRanksError,
    StepExistsError,
)
from holdfast.format import (
    MANIFEST,
    MAX_MANIFEST,
    Manifest,
    PartEntry,
    SaveId,
    ScalarEntry,
    data_name,
    decode_manifest,
    digest,
    encode_manifest,
    index_name,
    parse_file_name,
    step_folder,
    verify_step,
    versions,
)
from holdfast.storage import LocalStore
from holdfast.vault.messages import Order, Recipe

_COMMIT: Final = b"commit"
_ABORT: Final = b"abort: "
_TAKEOVER_S: Final = 5.0
"""How long the other ranks wait for rank 0 to create the manifest before they do it."""
_POLL_S: Final = 0.005


class Ballot(msgspec.Struct, frozen=True):
    """One rank's say: its durable part, or why there is none."""

    reason: str = ""
    part: PartEntry | None = None
    tree: str = ""
    created: float = 0.0
    scalars: tuple[ScalarEntry, ...] = ()
    meta: bytes = b"{}"
    replaces: str | None = None


ORPHAN_S: Final = 5.0
_LOOK_S: Final = 0.5

_BALLOT: Final = msgspec.msgpack.Decoder(Ballot)


def existing_step(store: LocalStore, order: Order) -> str | None:
    """The attempt that this save will replace, None if the step is free.

    Fails: StepExistsError if the step is committed and verifies, unless overwriting was asked for.
    """
    folder = step_folder(order.save.step)
    if not store.exists(folder, MANIFEST):
        return None
    try:
        data = store.read(folder, MANIFEST, max_bytes=MAX_MANIFEST)
        committed = decode_manifest(data)
    except HoldfastError:
        return ""  # unreadable, so it names no attempt; its files are found as leftovers
    if committed.save == order.save:
        return None  # a vault that died after the commit; the new one finds the work done
    if order.overwrite:
        return committed.save.attempt
    for _problem in verify_step(store, folder):
        return committed.save.attempt
    raise StepExistsError(
        f"step {order.save.step} is already saved in {store.root}, and it verifies",
        hint="pass overwrite=True to replace it",
    )


def is_committed(store: LocalStore, save: SaveId) -> bool:
    """Whether the manifest of this very save is there. Fails: StorageError."""
    folder = step_folder(save.step)
    if not store.exists(folder, MANIFEST):
        return False
    try:
        return decode_manifest(store.read(folder, MANIFEST, max_bytes=MAX_MANIFEST)).save == save
    except FormatError:
        return False


def withdraw(agreement: Agreement, save: SaveId, reason: str) -> None:
    """Take this rank out of a save, which aborts it for all; harmless if it is decided already."""
    topic = _topic(save)
    agreement.vote(topic, msgspec.msgpack.encode(Ballot(reason=reason)))
    agreement.decide(topic, _ABORT + f"rank {agreement.rank}: {reason}".encode()[:4000])


def forget(agreement: Agreement, save: SaveId) -> None:
    """Free the ballots of a save that is over for all ranks."""
    agreement.forget(_topic(save))


def _topic(save: SaveId) -> str:
    return f"{save.step}.{save.attempt}"


@final
class Commit:
    """The agreement of one rank with the others about one save."""

    def __init__(
        self,
        store: LocalStore,
        agreement: Agreement,
        order: Order,
        recipe: Recipe,
        *,
        orphaned: Callable[[], bool] = lambda: False,
    ) -> None:
        """`orphaned` is asked whether this rank's trainer is gone."""
        self._store = store
        self._orphaned = orphaned
        self._agreement = agreement
        self._order = order
        self._recipe = recipe
        self._topic = _topic(order.save)
        self._voted = False

    def run(self, index: bytes, replaces: str | None) -> None:
        """Vote, agree and commit; returns when the step is durable.

        Blocks: until all ranks have voted, `deadline_s` at most. Fails: AgreementError with the reasons.
        """
        self._vote(index, replaces)
        faults.site("vault.voted")
        ballots = self._decide()
        faults.site("vault.decided")
        manifest = self._manifest(ballots)
        first = ballots[0]
        self._create(encode_manifest(manifest), first.replaces)
        if first.replaces is not None and self._agreement.rank == 0:
            # The step is durable: what cannot be removed is left for the next start to clean.
            with suppress(HoldfastError):
                self._remove_replaced()

    def withdraw(self, reason: str) -> None:
        """Tell the others that this rank has failed, so that they do not wait for it."""
        if not self._voted:
            withdraw(self._agreement, self._order.save, reason)

    def is_over(self) -> bool:
        """Whether this save certainly is not and never will be committed, so that its files may go."""
        if not self._voted:
            return True
        try:
            reason = f"rank {self._agreement.rank} failed after its vote"
            if self._agreement.decide(self._topic, _ABORT + reason.encode()) != _COMMIT:
                return True
            # Another rank may create the manifest yet; alone, this one knows.
            return self._agreement.world == 1 and not is_committed(self._store, self._order.save)
        except HoldfastError:
            return False

    def _vote(self, index: bytes, replaces: str | None) -> None:
        order, recipe = self._order, self._recipe
        lead = self._agreement.rank == 0
        ballot = Ballot(
            part=PartEntry(
                part=recipe.part,
                index=index_name(recipe.part, order.save.attempt),
                size=len(index),
                digest=digest(index),
                nbytes=sum(piece.nbytes for piece in recipe.slices),
            ),
            # Scalars belong to the tree as much as arrays do: all ranks must mean the same step.
            tree=digest(msgspec.msgpack.encode((recipe.arrays, order.scalars))),
            created=order.created,
            scalars=order.scalars if lead else (),
            meta=order.meta if lead else b"{}",
            replaces=replaces,
        )
        self._voted = True  # whether or not the call succeeds, the others may see the ballot from here on
        self._agreement.vote(self._topic, msgspec.msgpack.encode(ballot))

    def _decide(self) -> Mapping[int, Ballot]:
        try:
            raw = self._await_ballots()
            ballots = {rank: _BALLOT.decode(data) for rank, data in raw.items()}
            problem = self._problem(ballots)
            proposal = _COMMIT if problem is None else _ABORT + problem.encode()[:4000]
            outcome = self._agreement.decide(self._topic, proposal)
        except MissingRanksError as error:
            outcome = self._agreement.decide(self._topic, _ABORT + error.message.encode())
            if outcome != _COMMIT:
                raise
            ballots = {}
        if outcome != _COMMIT:
            reason = outcome.removeprefix(_ABORT).decode(errors="replace")
            raise AgreementError(
                f"step {self._order.save.step} was not committed: {reason}",
                hint="earlier steps are untouched; the next save starts afresh",
            )
        if len(ballots) < self._agreement.world:
            # Somebody saw all the ballots, so they are all there by now.
            raw = self._agreement.ballots(self._topic, self._order.deadline_s)
            ballots = {rank: _BALLOT.decode(data) for rank, data in raw.items()}
        return ballots

    def _await_ballots(self) -> Mapping[int, bytes]:
        """The ballots of all ranks. Fails: MissingRanksError.

        A trainer that died before its vault knew of the save leaves nobody who could say so. Those whose own
        trainers died with it do not wait until the deadline: if for ORPHAN_S nobody has written a part of
        this save, nobody will.
        """
        deadline = Deadline(self._order.deadline_s)
        hopeless = Deadline(ORPHAN_S)
        while True:
            try:
                return self._agreement.ballots(self._topic, min(_LOOK_S, deadline.remaining()))
            except MissingRanksError:
                if deadline.expired() or hopeless.expired():
                    raise
                if not self._orphaned() or self._others_write():
                    hopeless = Deadline(ORPHAN_S)

    def _others_write(self) -> bool:
        """Whether somebody is at work on another part of this save."""
        folder, save = step_folder(self._order.save.step), self._order.save
        mine = data_name(self._recipe.part, save.attempt)
        theirs = [
            name
            for name in self._store.names(folder)
            if name != mine and (found := parse_file_name(name)) is not None and found.attempt == save.attempt
        ]
        return any(self._store.is_written(folder, name) for name in theirs)

    def _problem(self, ballots: Mapping[int, Ballot]) -> str | None:
        for rank, ballot in sorted(ballots.items()):
            if ballot.reason or ballot.part is None:
                return f"rank {rank}: {ballot.reason or 'no part'}"
        if len(ballots) < self._agreement.world:
            return "decided before all ranks had voted"
        odd = [rank for rank, ballot in sorted(ballots.items()) if ballot.tree != ballots[0].tree]
        if odd:
            return (
                f"ranks {odd} saved a different tree than rank 0 (names, shapes, shardings or Python "
                "scalars differ)"
            )
        return None

    def _manifest(self, ballots: Mapping[int, Ballot]) -> Manifest:
        first = ballots[0]
        parts = [ballot.part for _, ballot in sorted(ballots.items()) if ballot.part is not None]
        return Manifest(
            save=self._order.save,
            created=first.created,
            arrays=self._recipe.arrays,
            scalars=first.scalars,
            parts=tuple(parts),
            meta=msgspec.json.decode(first.meta),
            writer=versions(),
            nbytes=sum(part.nbytes for part in parts),
        )

    def _create(self, data: bytes, replaces: str | None) -> None:
        folder = step_folder(self._order.save.step)
        if self._agreement.rank != 0 and self._appeared(folder):
            # Seen is not synced: rank 0 may still be at it, and this rank is about to say "durable".
            self._store.sync_folder(folder)
            self._store.sync_folder()
            return
        if replaces is not None:
            self._store.replace(folder, MANIFEST, data=data)
        elif not self._store.create(folder, MANIFEST, data=data) and not is_committed(
            self._store, self._order.save
        ):
            raise StepExistsError(
                f"another run committed step {self._order.save.step} first",
                hint="do two runs write to the same folder?",
            )
        faults.site("vault.manifest.created")
        self._store.sync_folder()
        faults.site("vault.step.synced")

    def _appeared(self, folder: str) -> bool:
        """Whether rank 0 created the manifest in time."""
        deadline = Deadline(_TAKEOVER_S)
        while not deadline.expired():
            with suppress(HoldfastError):
                if is_committed(self._store, self._order.save):
                    return True
            time.sleep(_POLL_S)
        return False

    def _remove_replaced(self) -> None:
        """Remove the parts of the attempt that was replaced; never those of a live writer."""
        folder = step_folder(self._order.save.step)
        for name in self._store.names(folder):
            parsed = parse_file_name(name)
            if parsed is None or parsed.kind == "manifest":
                continue
            if parsed.attempt != self._order.save.attempt and not self._store.is_written(folder, name):
                self._store.remove(folder, name)
