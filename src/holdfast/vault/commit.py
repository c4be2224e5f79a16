"""The commit of a save: ballots, one decision, and the manifest created if absent.

Every rank votes once its part and index are durable. Whoever has seen all ballots proposes "commit", whoever
runs out of patience or failed proposes "abort"; the first proposal stands. Only after "commit" stands may the
manifest be created, and creating it is the commit. The manifest is a pure function of the ballots, so any
rank can finish for one that died.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
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
    StorageError,
)
from holdfast.format import (
    HEAD,
    MANIFEST,
    MAX_MANIFEST,
    ArrayTable,
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
    saved_by,
    step_folder,
    verify_step,
    versions,
)
from holdfast.storage import Store, Version, is_trouble
from holdfast.vault.intents import accepted, claim
from holdfast.vault.messages import Order, Recipe
from holdfast.vault.remains import announced_attempts, attempt_in, dead_attempts

_COMMIT: Final = b"commit"
_ABORT: Final = b"abort: "
COLLECTORS: Final = 8
"""Ranks below this gather all ballots and decide; the others wait for that, or all would be sent to all."""
_LEARN_S: Final = 5.0
"""How often those others look up from their wait."""
_BALLOT_S: Final = 5e-4
"""Seconds between two looks at all ballots, for each of them."""
_TAKEOVER_S: Final = 5.0
"""How long the other ranks wait for rank 0 to create the manifest before they do it."""


class Replaced(msgspec.Struct, frozen=True):
    """The committed save that another is to replace; no attempt where its manifest cannot be read."""

    attempt: str
    version: Version | None


class Ballot(msgspec.Struct, frozen=True):
    """One rank's say: its durable part, or why there is none."""

    reason: str = ""
    part: PartEntry | None = None
    tree: str = ""
    created: float = 0.0
    scalars: tuple[ScalarEntry, ...] = ()
    meta: bytes = b"{}"
    replaces: Replaced | None = None


ORPHAN_S: Final = 5.0
_LOOK_S: Final = 0.5

_BALLOT: Final = msgspec.msgpack.Decoder(Ballot)


def existing_step(store: Store, order: Order) -> Replaced | None:
    """The save that this one will replace, None if the step is free.

    Fails: StepExistsError if the step is committed and verifies, unless overwriting was asked for.
    """
    folder = step_folder(order.save.step)
    if not store.exists(folder, MANIFEST):
        return None
    version = store.version(folder, MANIFEST)  # before it is read: what comes between is noticed
    try:
        data = store.read(folder, MANIFEST, max_bytes=MAX_MANIFEST)
        committed = decode_manifest(data)
    except (FormatError, StorageError) as error:
        if is_trouble(store, error):
            raise
        return Replaced("", version)  # it names no attempt; its files are found as leftovers
    if committed.save == order.save:
        return None  # a vault that died after the commit; the new one finds the work done
    if order.overwrite:
        return Replaced(committed.save.attempt, version)
    for problem in verify_step(store, folder):
        if problem.cause is not None and is_trouble(store, problem.cause):
            raise problem.cause
        return Replaced(committed.save.attempt, version)
    raise StepExistsError(
        f"step {order.save.step} is already saved in {store.root}, and it verifies",
        hint="pass overwrite=True to replace it",
    )


def is_committed(store: Store, save: SaveId) -> bool:
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


def part(agreement: Agreement, session: str) -> None:
    """Say that this rank casts no ballots any more in a session: its trainer is gone, its saves are over.

    Whoever waits for one gives up then. It is a topic like those of saves: each rank votes on it as it ends.
    """
    topic = _parting(session)
    agreement.vote(topic, b"")
    # For those who only learn what is decided, and must not look at what all ranks say.
    if agreement.rank < COLLECTORS and parted(agreement, session).issuperset(
        range(min(COLLECTORS, agreement.world))
    ):
        agreement.decide(topic, b"")


def parted(agreement: Agreement, session: str) -> set[int]:
    """The ranks that have said so. What they had to say on a save was said before."""
    try:
        return set(agreement.ballots(_parting(session), 0.0))
    except MissingRanksError as error:
        return set(range(agreement.world)).difference(error.ranks)


def forget(agreement: Agreement, save: SaveId) -> None:
    """Free the ballots of a save that is over for all ranks."""
    agreement.forget(_topic(save))


def _topic(save: SaveId) -> str:
    return f"{save.step}.{save.attempt}"


def _parting(session: str) -> str:
    return f"parted.{session}"


@final
class Commit:
    """The agreement of one rank with the others about one save."""

    def __init__(
        self,
        store: Store,
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
        self._session = order.save.attempt.rpartition("-")[0]
        self._voted = False

    def run(self, index: bytes, table: ArrayTable, replaces: Replaced | None) -> None:
        """Vote, agree and commit; returns when the step is durable. `table` is that of the recipe's arrays.

        Blocks: until all ranks have voted, `deadline_s` at most. Fails: AgreementError with the reasons.
        """
        self._vote(index, table, replaces)
        faults.site("vault.voted")
        ballots = self._decide() if self._agreement.rank < COLLECTORS else self._learn()
        faults.site("vault.decided")
        if self._agreement.rank != 0 and self._appeared():
            return
        # Rank 0, or one that finishes for it.
        ballots = ballots or self._all_ballots()
        first = ballots[0]
        self._create(encode_manifest(self._manifest(ballots), table), first.replaces)
        if first.replaces is not None and self._agreement.rank == 0:
            # The step is durable: what cannot be removed is left for the next start to clean.
            with suppress(HoldfastError):
                self._remove_replaced(first.replaces)

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

    def _vote(self, index: bytes, table: ArrayTable, replaces: Replaced | None) -> None:
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
            tree=digest(msgspec.msgpack.encode((table.digest, order.scalars))),
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
            outcome = self._agreement.decide(self._topic, _ABORT + error.message.encode()[:4000])
            if outcome != _COMMIT:
                raise
            ballots = {}
        self._check_outcome(outcome)
        return ballots if len(ballots) == self._agreement.world else {}

    def _learn(self) -> Mapping[int, Ballot]:
        """Wait for what the ranks that collect ballots decide; no ballots, this rank has seen none.

        If they do not by the deadline, none of them is alive to do it any more.
        """
        deadline = Deadline(self._order.deadline_s + _TAKEOVER_S)
        hopeless: Deadline | None = None
        while True:
            # Asked before the look: what they decided before they parted is seen by it.
            alone = self._orphaned() and self._deciders_parted()
            outcome = self._agreement.decided(
                self._topic, 0.0 if alone else min(_LEARN_S, deadline.remaining())
            )
            if outcome is not None:
                break
            if not self._orphaned() or self._others_write():
                hopeless = None
            elif hopeless is None:
                hopeless = Deadline(ORPHAN_S)  # one look is none: a writer may be about to open its part
            if alone or deadline.expired() or (hopeless is not None and hopeless.expired()):
                reason = (
                    f"ranks 0 to {COLLECTORS - 1} had not decided when rank {self._agreement.rank} gave up"
                )
                outcome = self._agreement.decide(self._topic, _ABORT + reason.encode())
                break
        self._check_outcome(outcome)
        return {}

    def _check_outcome(self, outcome: bytes) -> None:
        if outcome != _COMMIT:
            reason = outcome.removeprefix(_ABORT).decode(errors="replace")
            raise AgreementError(
                f"step {self._order.save.step} was not committed: {reason}",
                hint="earlier steps are untouched; the next save starts afresh",
            )

    def _all_ballots(self) -> Mapping[int, Ballot]:
        """The ballots after the decision: somebody saw them all, so they are all there by now.

        Fails: AgreementError if they are not any more. This rank slept until the others were done with the
        save, and what it would make of the rest is half a step.
        """
        raw = self._agreement.ballots(self._topic, self._order.deadline_s)
        if len(raw) < self._agreement.world:
            raise AgreementError(
                f"{len(raw):,} of the {self._agreement.world:,} ballots on step {self._order.save.step} are "
                f"left as rank {self._agreement.rank} comes to commit it",
                hint="the run went on without this process; the next save starts afresh",
            )
        return {rank: _BALLOT.decode(data) for rank, data in raw.items()}

    def _await_ballots(self) -> Mapping[int, bytes]:
        """The ballots of all ranks. Fails: MissingRanksError.

        A rank that has parted without a ballot is not waited for. One whose vault died with its trainer
        leaves nobody who could say so. Those whose own trainers died with it do not wait until the deadline:
        if for ORPHAN_S nobody has written a part of this save, nobody will.
        """
        deadline = Deadline(self._order.deadline_s)
        hopeless = Deadline(ORPHAN_S)
        gone = self._parted() if self._orphaned() else set()
        while True:
            try:
                # Every look brings all ballots anew: the more there are, the rarer.
                look_s = 0.0 if gone else max(_LOOK_S, self._agreement.world * _BALLOT_S)
                return self._agreement.ballots(self._topic, min(look_s, deadline.remaining()))
            except MissingRanksError as error:
                if deadline.expired() or hopeless.expired():
                    raise
                # Known before that look, which would have shown what they had said.
                if never := gone.intersection(error.ranks):
                    raise self._without(sorted(never)) from None
                gone = self._parted().intersection(error.ranks)
                if not self._orphaned() or self._others_write():
                    hopeless = Deadline(ORPHAN_S)

    def _parted(self) -> set[int]:
        return parted(self._agreement, self._session) if self._session else set()

    def _deciders_parted(self) -> bool:
        """Whether all ranks that could decide have parted."""
        return bool(self._session) and self._agreement.decided(_parting(self._session)) is not None

    def _without(self, ranks: list[int]) -> MissingRanksError:
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[:32]}"
        return MissingRanksError(
            f"{who} ended without a part in step {self._order.save.step}",
            ranks=ranks,
            hint="look at the logs of those ranks: why did they end?",
        )

    def _others_write(self) -> bool:
        """Whether somebody is at work on another part of this save."""
        folder, save = step_folder(self._order.save.step), self._order.save
        if not self._store.has_locks:
            rank = self._agreement.rank
            return any(one.attempt == save.attempt and one.rank != rank for one in accepted(self._store))
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

    def _create(self, data: bytes, replaces: Replaced | None) -> None:
        folder = step_folder(self._order.save.step)
        claim(self._store, self._order.save)
        if replaces is not None:
            done = self._store.replace(folder, MANIFEST, data=data, expected=replaces.version)
        else:
            done = self._store.create(folder, MANIFEST, data=data)
        if not done and not is_committed(self._store, self._order.save):
            raise StepExistsError(
                f"another run committed step {self._order.save.step} first",
                hint="do two runs write to the same folder?",
            )
        faults.site("vault.manifest.created")
        self._store.sync_folder()
        faults.site("vault.step.synced")

    def _appeared(self) -> bool:
        """Whether rank 0 created the manifest in time; then it is durable."""
        folder = step_folder(self._order.save.step)
        # Those who hold no ballots finish for rank 0 only if none of the others does: 8 of them first, then
        # 16, and so on, or all would ask for the ballots of all.
        turns = max(1, self._agreement.rank.bit_length() - COLLECTORS.bit_length() + 2)
        deadline, pause = Deadline(turns * _TAKEOVER_S), self._store.poll_s
        while True:
            with suppress(HoldfastError):
                if self._store.exists(folder, MANIFEST) and self._is_ours(folder):
                    # Seen is not synced: rank 0 may still be at it, and this rank is about to say "durable".
                    self._store.sync_folder(folder)
                    self._store.sync_folder()
                    return True
            if deadline.expired():
                return False
            time.sleep(min(pause, deadline.remaining()))
            pause = min(2 * pause, max(self._store.poll_s, self._agreement.world * _LOOK_S / 10_000))

    def _is_ours(self, folder: str) -> bool:
        """Whether the manifest is that of this save, by its first bytes: ten thousand ranks ask at once."""
        with closing(self._store.open_part(folder, MANIFEST, direct=False)) as manifest:
            return saved_by(manifest.read(0, HEAD)) == self._order.save

    def _remove_replaced(self, replaced: Replaced) -> None:
        """Remove the files of the attempt that was replaced; the next save of the step may be on its way."""
        folder = step_folder(self._order.save.step)
        names = self._store.names(folder)
        gone = [replaced.attempt]
        if not replaced.attempt and self._store.has_locks:  # its manifest could not be read
            gone = dead_attempts(self._store, folder, names, announced_attempts(self._store))
        self._store.remove_all(folder, [name for name in names if attempt_in(name) in gone])
