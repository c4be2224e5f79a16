"""The source's end of a link: plans, runs, and chunks on their way to one target."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, final

import msgspec

from holdfast import faults
from holdfast.clock import Deadline
from holdfast.errors import DeadlineError, HoldfastError, TransferError
from holdfast.transfer.links import Channel
from holdfast.transfer.manifest import Manifest
from holdfast.transfer.messages import (
    ABORTED,
    COMMITTED,
    LIMIT,
    MISUSE,
    UNKNOWN,
    UNKNOWN_VERSION,
    Confirm,
    Confirmed,
    Credit,
    Describe,
    Described,
    Done,
    Forget,
    FromTarget,
    Lend,
    Ping,
    Prepare,
    Prepared,
    Refused,
    Run,
)
from holdfast.transfer.publication import Absent, Edition
from holdfast.transfer.served import NO_SCRATCH, Host, Refusal, ServedPlan, ServedRun, served_plan
from holdfast.transfer.streams import Feed, set_blocking
from holdfast.transfer.timers import Alarm
from holdfast.wire import ConnectionLost

MAX_PLANS: Final = 1024
MAX_SEGMENTS: Final = 4_000_000
"""Slices of all plans of a link: each costs the source some hundred bytes."""
MAX_RUNS: Final = 256
_MAX_WAIT_S: Final = 86_400.0
_MIN_PING_S: Final = 0.05

log = logging.getLogger("holdfast.transfer")

_decoder: Final = msgspec.msgpack.Decoder(FromTarget)


@final
class _Wait:
    """Waits for a version, with a sign of life now and then, and goes on when it is there."""

    def __init__(
        self, link: TargetLink, asked: Describe | Run, name: str, then: Callable[[Edition], None]
    ) -> None:
        self._link = link
        self._asked = asked
        self._name = name
        self._then = then
        self._deadline = Deadline(min(max(0.0, asked.wait_s), _MAX_WAIT_S))
        self._lock = threading.Lock()
        self._over = False
        self._ticking: Alarm | None = None

    def attempt(self) -> None:
        """Go on if the version is there; refuse if it never will be, or not in time."""
        try:
            try:
                edition = self._link.host.shelf.find(self._name, self._asked.version)
            except Absent as absent:
                if not absent.ever or self._deadline.expired():
                    waited = self._deadline.timeout_s
                    late = f" (waited {waited:.1f} s)" if absent.ever and waited else ""
                    raise Refusal(UNKNOWN_VERSION, absent.message + late, absent.hint) from absent
                self._stand_by()
                return
            if self.end():
                self._then(edition)
        except HoldfastError as error:
            self.end()
            self._link.refuse(self._asked.seq, error)

    def _stand_by(self) -> None:
        shelf = self._link.host.shelf
        with self._lock:
            if self._over:
                return
            shelf.when_published(self._name, self._wake)
            if self._ticking is None:
                self._ticking = self._link.host.timers.after(self._pause(), self._tick)
        # It may have come between looking and asking to be woken.
        try:
            shelf.find(self._name, self._asked.version)
        except Absent:
            return
        self._wake()

    def _wake(self) -> None:
        self._link.host.workers.submit(self.attempt)

    def _pause(self) -> float:
        return min(self._link.ping_s(self._asked.ping_s), self._deadline.remaining() + 0.001)

    def _tick(self) -> float | None:
        if self._over:
            return None
        if self._deadline.expired():
            self._wake()
            return None
        self._link.host.workers.submit(partial(self._link.say, Ping(self._asked.seq)))
        return self._pause()

    def end(self) -> bool:
        """Wait no more; whether it did until now."""
        with self._lock:
            if self._over:
                return False
            self._over = True
        self._link.host.shelf.forget_waiter(self._name, self._wake)
        if self._ticking is not None:
            self._link.host.timers.cancel(self._ticking)
        self._link.waits.discard(self)
        return True


@final
class TargetLink:
    """The connections of one target: one for control, and those that chunks go out on."""

    def __init__(self, host: Host, number: int, target: str, incarnation: str, sock: socket.socket) -> None:
        self.host = host
        self.number = number
        self.target = target
        self.incarnation = incarnation
        self.feed: Feed[ServedRun] = Feed()
        self._channel: Channel[FromTarget] = Channel(sock, _decoder)
        self._lock = threading.Lock()
        self._plans: dict[int, ServedPlan] = {}
        self._runs: dict[int, ServedRun] = {}
        self.waits: set[_Wait] = set()
        self._data: list[socket.socket] = []
        self._closed = ""

    def serve(self) -> None:
        """Answer until the target is gone."""
        try:
            while True:
                with contextlib.suppress(DeadlineError):
                    message, fds = self._channel.receive(timeout_s=3600.0)
                    self._handle(message, fds)
                    for fd in fds:
                        os.close(fd)
        except ConnectionLost as error:
            self.close(error.message)
        except Exception as error:
            log.exception("the link to %s failed", self.target)
            self.close(f"the link failed: {error}")

    def release(self) -> None:
        """Close the control connection, after `serve`."""
        self.close("the link ended")
        self._channel.close()

    def send_chunks(self, sock: socket.socket) -> None:
        """Send what the feed gives, on one data connection, until the link is closed."""
        with self._lock:
            if self._closed:
                return
            self._data.append(sock)
        scratch = NO_SCRATCH
        try:
            set_blocking(sock)
            while (found := self.feed.take()) is not None:
                run, chunk = found
                scratch = run.send_chunk(chunk, sock, scratch)
        except Exception as error:  # whatever it is, the target must not wait for what never comes
            self.close(f"a data connection broke: {error}")
        finally:
            with self._lock:
                self._data.remove(sock)

    @property
    def num_streams(self) -> int:
        return len(self._data)

    def check_open(self) -> None:
        if self._closed:
            raise ConnectionLost(self._closed)

    def ping_s(self, asked: float) -> float:
        return max(_MIN_PING_S, asked)

    def say(self, message: object, fds: tuple[int, ...] = ()) -> None:
        """Tell the target; if that is not possible, the link is over."""
        try:
            self._channel.send(message, fds)
        except HoldfastError as error:
            self.close(error.message)

    def refuse(self, seq: int, error: HoldfastError) -> None:
        code = error.code if isinstance(error, Refusal) else MISUSE
        self.say(Refused(seq, code, error.message, error.hint or ""))

    def run(self, number: int) -> ServedRun | None:
        """A run under way, for a target in the same process."""
        return self._runs.get(number)

    # ---- what a target says

    def _handle(self, message: FromTarget, fds: list[int]) -> None:
        match message:
            case Credit():
                self.feed.credit(message.run, message.nbytes)
            case Run():
                self._run(message)
            case Done():
                faults.site("transfer.done")
                run = self._runs.pop(message.run, None)
                if run is not None:
                    run.finish(COMMITTED if message.outcome == COMMITTED else ABORTED)
            case Confirm():
                self._confirm(message)
            case Describe():
                self._await(message)
            case Prepare():
                self._prepare(message)
            case Lend():
                self._lend(message, fds)
            case Forget():
                self._forget(message)
            case Ping():
                pass

    def _await(self, asked: Describe) -> None:
        wait = _Wait(self, asked, asked.name, partial(self._describe, asked))
        with self._lock:
            if self._closed:
                return  # nobody would ever end it
            self.waits.add(wait)
        wait.attempt()

    def _describe(self, asked: Describe, edition: Edition) -> None:
        faults.site("transfer.describe")
        manifest = Manifest((), ()) if asked.brief else edition.manifest
        versions = self.host.shelf.versions(asked.name)
        self.say(Described(asked.seq, edition.version, versions, edition.digest, manifest))

    def _prepare(self, asked: Prepare) -> None:
        try:
            if len(self._plans) >= MAX_PLANS:
                raise Refusal(LIMIT, f"{MAX_PLANS} plans on one link", "close plans that are not used")
            segments = len(asked.segments) + sum(plan.num_segments for plan in self._plans.values())
            if segments > MAX_SEGMENTS:
                raise Refusal(LIMIT, f"{segments:,} slices on one link; {MAX_SEGMENTS:,} are allowed")
            self._plans[asked.plan] = served_plan(asked, self.host.shelf, self.host.streams)
            faults.site("transfer.prepare")
        except HoldfastError as error:
            self.refuse(asked.seq, error)
            return
        self.say(Prepared(asked.seq))

    def _lend(self, asked: Lend, fds: list[int]) -> None:
        plan = self._plans.get(asked.plan)
        if plan is None or len(fds) != 1 or len(plan.buffers) >= MAX_PLANS:
            return  # the run that names this buffer fails
        try:
            plan.lend(asked.buffer, fds.pop(), asked.nbytes)
        except TransferError as error:
            self.close(error.message)

    def _confirm(self, asked: Confirm) -> None:
        """Nobody writes the memory of a run that is not over."""
        run = self._runs.get(asked.run)
        if run is None or run.over:
            self.refuse(asked.seq, Refusal(UNKNOWN_VERSION, "the version was revoked while it was read"))
        else:
            self.say(Confirmed(asked.seq))

    def _forget(self, asked: Forget) -> None:
        if asked.buffer < 0:
            self._plans.pop(asked.plan, None)
        elif asked.plan in self._plans:
            self._plans[asked.plan].buffers.pop(asked.buffer, None)

    def _run(self, asked: Run) -> None:
        plan = self._plans.get(asked.plan)
        try:
            if plan is None or plan.digest != asked.digest:
                raise Refusal(MISUSE, "the plan is not known here")
            if len(self._runs) >= MAX_RUNS or asked.run in self._runs:
                raise Refusal(LIMIT, f"{len(self._runs)} runs on one link")
            if asked.buffer >= 0 and asked.buffer not in plan.buffers:
                raise Refusal(MISUSE, "the buffer to write was not lent")
        except Refusal as error:
            self.refuse(asked.seq, error)
            return
        run = ServedRun(self, asked, plan)
        wait = run.wait = _Wait(self, asked, plan.name, run.begin)
        with self._lock:
            if self._closed:
                return  # nobody would ever end it
            self._runs[asked.run] = run
        wait.attempt()

    def close(self, reason: str) -> None:
        """End the link and every run on it; what became of them at the target is unknown."""
        with self._lock:
            if self._closed:
                return
            self._closed = reason or "closed"
            data, runs, waits = list(self._data), list(self._runs.values()), list(self.waits)
            self._runs.clear()
        self.feed.close()
        self._channel.shutdown()
        for sock in data:
            _shut(sock)
        for run in runs:
            run.finish(UNKNOWN)
        for wait in waits:
            wait.end()
        self._plans.clear()


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
