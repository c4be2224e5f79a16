"""One run of a plan, from asking the peers to the commit. One thread per run; all its waits are here."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

from holdfast import faults
from holdfast.arrays import Adapter, Bytes1D, Placement, decode_scalar, landed
from holdfast.errors import (
    HoldfastError,
    MismatchError,
    StalledError,
    TransferError,
    VersionGoneError,
)
from holdfast.transfer.borrowing import Intake, Source, cast, landings
from holdfast.transfer.buffers import BufferSet
from holdfast.transfer.futures import Transfer, TransferResult
from holdfast.transfer.legs import Leg, NotLentError
from holdfast.transfer.manifest import Scalar
from holdfast.transfer.messages import ABORTED, BORROWED, COMMITTED, Confirm, Confirmed, Done, Run
from holdfast.transfer.patience import Patience, late_s
from holdfast.transfer.pulling import PeerLink

if TYPE_CHECKING:
    from holdfast.transfer.plan import Tie, TransferPlan

log = logging.getLogger("holdfast.transfer")

_RETRY_S: Final = 0.02
LENT: Final = "lent"
"""The transport of what was copied out of a peer's own memory."""


@final
class Drive:
    """Runs a plan once; called on a thread of its own."""

    def __init__(
        self, plan: TransferPlan, transfer: Transfer, version: int | None, deadline: Patience, checked: bool
    ) -> None:
        self._plan = plan
        self._settings = plan.host.settings
        self._transfer: Transfer | None = transfer
        self._version = version
        self._deadline = deadline
        self._checked = checked
        self._began = time.monotonic()
        self._wake = threading.Event()
        self._buffers: BufferSet | None = None
        self._legs: list[tuple[Leg, PeerLink]] = []
        self._intake: Intake | None = None
        transfer.attach(self._progress, self.cancel)

    def _progress(self) -> tuple[int, int]:
        if self._intake is not None:
            return self._intake.done_bytes, self._plan.nbytes
        return sum(leg.done_bytes for leg, _ in self._legs), self._plan.nbytes

    def cancel(self) -> None:
        """Stop it, by any thread; nothing happens if it is over."""
        self._deadline.cancelled = True
        self._wake.set()

    def __call__(self) -> None:
        result, failure = None, None
        try:
            result = self._retried()
        except HoldfastError as error:
            failure = error
        except Exception as error:
            log.exception("a transfer failed")
            failure = TransferError(f"the transfer failed: {error!r}")
            failure.__cause__ = error
        if failure is not None:
            log.debug("a transfer was aborted", exc_info=failure)
            _without_frames(failure)
        transfer, self._transfer = self._transfer, None
        assert transfer is not None
        end = transfer.finish(result, failure)
        # Nothing may refer to the tree but its owner, as soon as that has it: that is what frees the buffer.
        del transfer, result
        self._plan.ended(self)
        end()

    def _retried(self) -> TransferResult:
        while True:
            try:
                return self._run()
            except VersionGoneError:
                cut_off = any(leg.cut_off for leg, _ in self._legs)
                self._abort()
                # The newest may be gone before it was asked for, or before all were.
                if cut_off or self._version is not None or self._deadline.expired():
                    raise
                time.sleep(_RETRY_S)
            except MismatchError as error:
                self._abort()
                problems = self._plan.changes(self._version, self._deadline)
                if not problems:
                    raise
                raise MismatchError(problems, source="publication", hint=error.hint) from error
            except BaseException:
                self._abort()
                raise

    def _run(self) -> TransferResult:
        plan = self._plan
        connects = plan.connect(self._deadline)
        version = self._version if self._version is not None else plan.common_version(self._deadline)
        if plan.borrows and all(tie.open_link().mover.name == "memfd" for tie in plan.ties):
            try:
                return self._run_borrowed(version, connects)
            except NotLentError:
                plan.borrows = False
        made = plan.buffers.made
        self._buffers, given_up = plan.buffers.take()
        fresh = plan.buffers.made - made
        for number in given_up:
            plan.unready(number)
        for tie in plan.ties:
            link = tie.open_link()
            leg = Leg(plan.host.next_run(), tie.route, self._buffers, self._wake, checked=self._checked)
            buffer = link.ready(tie.number, self._buffers)
            leg.lent = (tie.number, buffer)
            self._legs.append((leg, link))
            link.begin(leg, partial(self._asked, leg.number, tie, buffer, version))
        faults.site("transfer.run")
        self._wait()
        found, tree = self._placed()
        faults.site("transfer.commit")
        plan.commit(found, tree)
        transports = {leg.peer: link.mover.name for leg, link in self._legs}
        self._tell_committed()
        return TransferResult(
            tree,
            found,
            plan.nbytes,
            time.monotonic() - self._began,
            transports,
            self._checked,
            fresh,
            connects,
            {leg.peer: leg.route.nbytes for leg, _ in self._legs},
        )

    def _run_borrowed(self, version: int, connects: int) -> TransferResult:
        """Read the peers' memory instead of having it sent. Fails: NotLentError where it is not to be had."""
        plan, outcome = self._plan, ABORTED
        asked: list[tuple[PeerLink, int]] = []
        try:
            loans, sources = [], []
            for tie in plan.ties:
                asked.append((tie.open_link(), plan.host.next_run()))
                link, number = asked[-1]
                loan, memory = link.borrow(
                    partial(self._asked, number, tie, BORROWED, version), self._deadline
                )
                if loan.run != number:
                    raise TransferError(f"{link.peer}: it lent something for another run")
                loans.append(loan)
                sources.append(Source(tie.route, tie.manifest, loan, memory))
                del memory
            leaves = self._leaves([loan.scalars for loan in loans])
            into = landings(plan.batches)
            with landed(into), Intake(plan, into, sources) as self._intake:
                faults.site("transfer.run")
                self._intake.run(plan, leaves, self._deadline)
                faults.site("transfer.borrowed")
                for link, number in asked:
                    answer = link.ask(partial(Confirm, run=number), self._deadline, "confirm")
                    if not isinstance(answer, Confirmed):
                        raise TransferError(f"{link.peer}: it did not confirm what it lent")
            tree = plan.rebuild(leaves)
            faults.site("transfer.commit")
            plan.commit(loans[0].version, tree)
            outcome = COMMITTED
        except BaseException:
            self._intake = None
            raise
        finally:
            for link, number in asked:
                link.tell(Done(number, outcome))
        return TransferResult(
            tree,
            loans[0].version,
            plan.nbytes,
            time.monotonic() - self._began,
            {tie.route.peer: LENT for tie in plan.ties},
            self._checked,
            0,
            connects,
            {tie.route.peer: tie.route.nbytes for tie in plan.ties},
        )

    def _tell_committed(self) -> None:
        """Let the peers go. The version is in service: nothing that fails here makes the run a failure."""
        try:
            faults.site("transfer.done")
            for leg, link in self._legs:
                leg.close()
                link.mover.settled(leg)
                link.end(leg, COMMITTED)
        except Exception:
            log.exception("a peer was not told that its version is in service")

    def _asked(self, run: int, tie: Tie, buffer: int, version: int, seq: int) -> Run:
        return Run(
            seq,
            run,
            tie.number,
            tie.route.route.digest,
            version,
            self._settings.window_bytes,
            self._checked,
            self._deadline.remaining(),
            self._settings.idle_s / 4,
            buffer,
        )

    # ---- waiting

    def _wait(self) -> None:
        """Return when every chunk of every peer has arrived and verified."""
        look_s, looked = self._settings.idle_s / 8, self._began
        while True:
            self._wake.clear()
            self._deadline.check(self._so_far())
            waiting = False
            for leg, _ in self._legs:
                if leg.error is not None:
                    raise leg.error
                waiting = waiting or not leg.complete
            if not waiting:
                return
            now = time.monotonic()
            if now - looked > look_s + late_s(self._settings.idle_s):
                # We were stopped ourselves, or busy: the silence was ours, not the peers'.
                for leg, _ in self._legs:
                    leg.heard = now
                    leg.moved_at = now if leg.moved_at else 0.0
                    leg.started_at = now
            looked = now
            self._wake.wait(min(look_s, self._time_left(now)))

    def _time_left(self, now: float) -> float:
        """Seconds until the first deadline. Fails: StalledError if one has passed."""
        left = self._deadline.remaining()
        if left <= 0:
            behind = [leg.peer for leg, _ in self._legs if not leg.complete]
            missing = [leg.peer for leg, _ in self._legs if leg.started is None]
            if missing:
                which = "no version" if self._version is None else f"version {self._version} not"
                raise VersionGoneError(
                    f"{', '.join(missing)}: {which} published as {self._plan.name!r} within "
                    f"deadline_s={self._deadline.timeout_s:g}",
                    hint="publish it, or give the run a longer deadline_s",
                )
            raise StalledError(
                f"{', '.join(behind)}: not done within deadline_s={self._deadline.timeout_s:g} "
                f"({self._so_far()})",
                hint="give it a longer deadline_s, or find out what is slow",
            )
        for leg, link in self._legs:
            if not leg.complete:
                left = min(left, self._leg_left(leg, link, now))
        return left

    def _leg_left(self, leg: Leg, link: PeerLink, now: float) -> float:
        idle, first = self._settings.idle_s, self._settings.first_byte_s
        left = leg.heard + idle - now
        phase, limit = "it is silent", f"idle_s={idle:g}"
        if leg.started is not None and leg.route.nbytes:
            if not leg.moved_at:
                data, what, bound = (
                    leg.started_at + first - now,
                    "no first byte came",
                    f"first_byte_s={first:g}",
                )
            else:
                data, what, bound = leg.moved_at + idle - now, "bytes stopped coming", f"idle_s={idle:g}"
            if data < left:
                left, phase, limit = data, what, bound
        if left <= 0:
            # What it still sends, if it wakes up, must not meet another run.
            link.lose(f"{phase} ({limit})")
            raise StalledError(
                f"{leg.peer}: {phase} for {limit} ({self._so_far()})",
                hint="the peer is stopped or stuck, or the network drops what it sends; the version before "
                "stays in service, and the next run connects again",
            )
        return left

    def _so_far(self) -> str:
        done, total = self._progress()
        return f"{done:,} of {total:,} bytes so far"

    # ---- the end

    def _placed(self) -> tuple[int, Any]:
        """The version and its tree, made of the buffer without a copy where the framework can."""
        plan = self._plan
        leaves = self._leaves([leg.started.scalars for leg, _ in self._legs if leg.started is not None])
        started = self._legs[0][0].started
        assert self._buffers is not None
        assert started is not None
        # From here on the buffer is free when the last array made of it is gone.
        buffers, self._buffers = self._buffers, None
        with plan.buffers.handed_out(buffers) as root:
            for adapter, at, sinks in plan.batches:
                made = _made(adapter, sinks, root)
                if adapter is not None and buffers.pinned:
                    adapter.ready(made)
                for index, leaf in zip(at, made, strict=True):
                    leaves[index] = leaf
        return started.version, plan.rebuild(leaves)

    def _leaves(self, found: Sequence[tuple[Scalar, ...]]) -> list[Any]:
        """The leaves of the template, with the scalars that the peers have. Fails: MismatchError."""
        scalars = _agreed(found)
        leaves = list(self._plan.template.flat.leaves)
        for one in self._plan.template.wanted if scalars else ():
            if one.sink is None:
                leaves[one.at] = decode_scalar(scalars[one.stored].type, scalars[one.stored].value)
        return leaves

    def _abort(self) -> None:
        """Tell the peers, and see whether the buffer can be used again."""
        clean = True
        for leg, link in self._legs:
            quiet = leg.close()
            clean = link.mover.settled(leg) and quiet and clean
            link.end(leg, ABORTED)
        self._legs = []
        buffers, self._buffers = self._buffers, None
        if buffers is None:
            return
        if clean:
            self._plan.buffers.give_back(buffers)
        else:
            # Somebody may write it even now, or when it wakes up.
            self._plan.buffers.discard(buffers)
            self._plan.unready(buffers.number)


def _made(adapter: Adapter | None, sinks: Sequence[Any], root: Bytes1D) -> list[Any]:
    """The arrays of one framework, of the bytes that came."""
    batch = []
    for sink, extents, cast_from in sinks:
        boxes = {box: root[start:stop] for box, start, stop in extents}
        if cast_from is not None:
            boxes = cast(boxes, cast_from, sink.description.layout.dtype)
        batch.append(Placement(sink, boxes, True))
    if adapter is None:
        return [one.sink.placed(one.boxes) for one in batch]
    return adapter.place(batch)


def _without_frames(error: BaseException | None) -> None:
    """Let go of the frames an error came through: whoever keeps it would keep the buffers they refer to."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _agreed(found: Sequence[tuple[Scalar, ...]]) -> dict[str, Scalar]:
    """The scalars of all peers. Fails: MismatchError."""
    scalars: dict[str, Scalar] = {}
    problems = []
    for mine in found:
        for scalar in mine:
            other = scalars.setdefault(scalar.name, scalar)
            if other != scalar:
                problems.append(f"{scalar.name}: one peer has {scalar.value}, another {other.value}")
    if problems:
        raise MismatchError(
            problems, source="peers", hint="peers must publish the same values as one version"
        )
    return scalars
