"""What may come between two steps: each test forces one order of events that the scheduler seldom chooses."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from holdfast.errors import PeerLostError, StalledError, TransferCancelled, VersionGoneError
from holdfast.transfer import Endpoint, futures, legs, pulling, running, served, serving
from holdfast.transfer.dialling import Dialling
from holdfast.transfer.legs import Leg
from holdfast.transfer.links import address_of
from holdfast.transfer.manifest import published
from holdfast.transfer.messages import UNKNOWN, Describe, Failed
from holdfast.transfer.movers import ProcessMover
from holdfast.transfer.patience import Patience
from holdfast.transfer.publication import Shelf
from holdfast.transfer.pulling import PeerLink
from holdfast.transfer.served import ServedRun
from holdfast.transfer.serving import TargetLink
from holdfast.transfer.streams import Feed, send_hashed
from holdfast.transfer.timers import Timers
from holdfast.transfer.workers import Workers
from tests.transfer.raw import RawTarget
from tests.transfer.test_endpoint import until

SOON_S = 10.0
SHARED = ("memfd", "tcp")

Pair = Callable[..., tuple[Endpoint, Endpoint]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Makes a source and a target that are closed afterwards."""
    made: list[Endpoint] = []

    def two(*ways: str) -> tuple[Endpoint, Endpoint]:
        made.extend(Endpoint(transports=ways, chunk_bytes=1 << 16) for _ in range(2))
        return made[-2], made[-1]

    yield two
    for endpoint in made:
        endpoint.close()


def tree(version: int) -> dict[str, Any]:
    return {"w": np.full(1000, version)}


# ---- the source lets go


def test_a_run_that_is_revoked_before_it_copies_brings_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair("process")
    source.publish("w", tree(1), 1)
    plan = target.prepare(source.address, "w")
    plan.run().result(SOON_S)
    second = source.publish("w", tree(2), 2)
    copied = threading.Event()
    brought = []
    copy, handle = ProcessMover._copy, PeerLink._handle

    def late(self: ProcessMover, leg: Leg, *rest: Any) -> None:
        second.revoke("the test wants it")
        copy(self, leg, *rest)
        brought.append((leg.complete, leg.done_bytes))
        copied.set()

    def later(self: PeerLink, message: Any, fds: list[int]) -> None:
        if isinstance(message, Failed):  # nor does the target hear of it before
            assert copied.wait(SOON_S)
        handle(self, message, fds)

    monkeypatch.setattr(ProcessMover, "_copy", late)
    monkeypatch.setattr(PeerLink, "_handle", later)
    with pytest.raises(VersionGoneError, match="the test wants it"):
        plan.run(2).result(SOON_S)
    assert brought == [(False, 0)]
    assert plan.current is not None
    assert plan.current[0] == 1


def test_a_revoked_version_is_read_no_more_also_if_its_lease_had_run_out(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair("tcp")
    version = source.publish("w", {"w": np.zeros(40_000)}, 1)  # more chunks than are under way at once
    plan = target.prepare(source.address, "w")
    within, go_on = threading.Event(), threading.Event()
    waited = []
    await_out = ServedRun.await_out

    def held(*args: Any) -> bytes:
        within.set()
        assert go_on.wait(SOON_S)
        return send_hashed(*args)

    def awaited(run: ServedRun, timeout_s: float) -> None:
        waited.append(run.number)
        go_on.set()
        await_out(run, timeout_s)

    monkeypatch.setattr(served, "send_hashed", held)
    monkeypatch.setattr(ServedRun, "await_out", awaited)
    transfer = plan.run()
    assert within.wait(SOON_S)
    source.shelf.revoke(source.shelf.find("w"), "its lease ran out")
    assert not version.wait_released(0)
    assert version.readers == 1
    version.revoke("its memory is needed")
    assert len(waited) == 1
    assert version.wait_released(SOON_S)
    assert set(version.targets().values()) == {"aborted"}
    with pytest.raises(VersionGoneError):
        transfer.result(SOON_S)


def test_a_target_that_reads_nothing_holds_up_no_timer() -> None:
    timers, workers = Timers("test"), Workers("test")
    shelf = Shelf(timers, workers)
    told, go_on, fired = threading.Event(), threading.Event(), threading.Event()

    class Stuck:
        def cut_off(self, reason: str) -> None:
            told.set()
            go_on.wait(SOON_S)

        def await_out(self, timeout_s: float) -> None:
            pass

    shelf.publish("w", lambda: published(tree(1)), 1, lease_s=600.0, keep=1)
    edition = shelf.find("w")
    assert edition.read(Stuck(), "target") is not None
    timers.after(0.0, lambda: shelf._lapse(edition))
    assert told.wait(SOON_S)
    timers.after(0.0, fired.set)
    assert fired.wait(SOON_S / 2)
    go_on.set()
    timers.close()
    workers.close(SOON_S)


@pytest.mark.parametrize("way", ["tcp", "memfd"])
def test_a_run_that_is_asked_for_while_its_link_ends_holds_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    source, target = pair(way)
    version = source.publish("w", tree(1), 1)
    plan = target.prepare(source.address, "w")
    asked = threading.Event()
    run = TargetLink._run

    def begun(link: TargetLink, *args: Any) -> ServedRun:
        link.close("the test wants it")
        return ServedRun(link, *args)

    def watched(link: TargetLink, message: Any) -> None:
        run(link, message)
        asked.set()

    monkeypatch.setattr(serving, "ServedRun", begun)
    monkeypatch.setattr(TargetLink, "_run", watched)
    with pytest.raises(PeerLostError):
        plan.run().result(SOON_S)
    assert asked.wait(SOON_S)
    assert version.readers == 0
    version.release()
    assert version.wait_released(0)


def test_a_run_that_ends_while_it_begins_is_not_left_in_the_feed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair("tcp")
    source.publish("w", tree(1), 1)
    plan = target.prepare(source.address, "w")
    queued: list[int] = []
    add, begin = Feed.add, ServedRun.begin
    begun = threading.Event()

    def late(feed: Feed[ServedRun], number: int, run: ServedRun) -> None:
        run.finish(UNKNOWN)
        add(feed, number, run)

    def watched(run: ServedRun, edition: Any) -> None:
        begin(run, edition)
        queued.extend(run._link.feed._runs)
        begun.set()

    monkeypatch.setattr(Feed, "add", late)
    monkeypatch.setattr(ServedRun, "begin", watched)
    transfer = plan.run()
    assert begun.wait(SOON_S)
    transfer.cancel()
    assert queued == []


def test_a_question_that_waits_ends_with_its_link(pair: Pair) -> None:
    source, _ = pair("tcp")
    with RawTarget(source.address) as client:
        client.say(Describe(1, "later", wait_s=600.0, ping_s=600.0))
        assert until(lambda: bool(source.timers._due))
        assert source.shelf._waiters["later"]
    assert until(lambda: not source.shelf._waiters["later"])
    assert until(lambda: [one for one in source.timers._due if one.function is not None] == [])


# ---- the target waits


@pytest.mark.parametrize(("idle_s", "stopped_s"), [(10.0, 1000.0), (0.5, 0.8)], ids=["long", "short"])
def test_a_target_that_was_stopped_itself_blames_nobody(
    monkeypatch: pytest.MonkeyPatch, idle_s: float, stopped_s: float
) -> None:
    """While it asks, and in a run, its clock jumps by more than a silence that would be the source's."""
    stops = 0

    class Stopping(threading.Event):
        first = True

        def wait(self, timeout: float | None = None) -> bool:
            nonlocal stops
            if self.first:
                self.first = False
                stops += 1
                return False
            return super().wait(timeout)

    class Question(pulling._Question):
        def __init__(self) -> None:
            super().__init__()
            self.event = Stopping()

    now = time.monotonic
    clock = SimpleNamespace(monotonic=lambda: now() + stops * stopped_s)
    for module in (legs, pulling, running):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(pulling, "_Question", Question)
    monkeypatch.setattr(running, "threading", SimpleNamespace(Event=Stopping))
    with Endpoint(transports=("tcp",)) as source, Endpoint(transports=("tcp",), idle_s=idle_s) as target:
        source.publish("w", tree(1), 1)
        plan = target.prepare(source.address, "w")
        assert stops == 2, "it asks what there is, and for a plan of it"
        transfer = plan.run(2)
        assert until(lambda: stops == 3)
        source.publish("w", tree(2), 2)
        assert transfer.result(SOON_S).version == 2


def test_who_brought_a_tree_lets_go_of_it_before_it_says_so(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair("tcp")
    source.publish("w", tree(1), 1)
    plan = target.prepare(source.address, "w")
    go_on = threading.Event()

    class Said(threading.Event):
        def set(self) -> None:
            super().set()
            assert go_on.wait(SOON_S)

    monkeypatch.setattr(futures, "threading", SimpleNamespace(Event=Said, Lock=threading.Lock))
    fresh = [plan.run().result(SOON_S).fresh_buffers for _ in range(4)]
    go_on.set()
    assert fresh == [1, 1, 0, 0]


# ---- the target gives up


def test_a_plan_that_is_closed_in_a_run_leaves_its_links_to_others(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair(*SHARED)
    source.publish("w", tree(1), 1)
    other, plan = target.prepare(source.address, "w"), target.prepare(source.address, "w")
    link = other.ties[0].open_link()
    take = plan.buffers.take

    def taken() -> Any:
        found = take()
        plan.close()
        return found

    monkeypatch.setattr(plan.buffers, "take", taken)
    with pytest.raises(TransferCancelled):
        plan.run().result(SOON_S)
    assert not link.lost
    assert other.run().result(SOON_S).connects == 0


def test_a_run_that_was_refused_keeps_its_buffer(pair: Pair) -> None:
    source, target = pair(*SHARED)
    source.publish("w", tree(1), 1, keep=1)
    plan = target.prepare(source.address, "w")
    plan.run().result(SOON_S)
    source.publish("w", tree(2), 2, keep=1)
    with pytest.raises(VersionGoneError):
        plan.run(1).result(SOON_S)
    assert plan.run(2).result(SOON_S).fresh_buffers == 0


def test_answers_that_come_while_a_run_ends_do_no_harm(pair: Pair) -> None:
    source, target = pair("tcp")
    source.publish("w", tree(1), 1)
    plan = target.prepare(source.address, "w")
    link = plan.ties[0].open_link()

    class Racing(dict[int, Any]):
        """Whoever goes through it meets the thread that listens."""

        def items(self) -> Any:
            return self._meeting(super().items())

        def _meeting(self, found: Iterable[Any]) -> Iterator[Any]:
            for one in found:
                yield one
                self.pop(-1, None)

    link._asked = Racing({-1: None})  # what another thread asked
    transfer = plan.run(7)
    transfer.cancel()
    with pytest.raises(TransferCancelled):
        transfer.result(SOON_S)
    link._asked.pop(-1, None)
    assert link._asked == {}


# ---- connecting


def test_a_deadline_bounds_connecting_too() -> None:
    with (
        Endpoint(connect_s=60.0) as target,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        began = time.monotonic()
        with pytest.raises(StalledError, match="no greeting"):
            target.prepare(f"127.0.0.1:{silent.getsockname()[1]}", "w", timeout_s=0.05)
        assert time.monotonic() - began < SOON_S


def test_a_run_that_was_cancelled_dials_nobody(pair: Pair) -> None:
    source, target = pair("tcp")
    patience = Patience(SOON_S)
    patience.cancelled = True
    with pytest.raises(TransferCancelled):
        target.link(address_of(source.address), patience)
    assert not source._links


def test_those_that_wait_for_another_one_to_dial_share_what_comes_of_it() -> None:
    dialling, address = Dialling(), address_of("127.0.0.1:9")
    dialled: list[int] = []
    found: list[BaseException] = []
    waiting = threading.Semaphore(0)

    class Watched(Patience):  # type: ignore[misc]  # it is final, but a test may look
        def remaining(self) -> float:
            waiting.release()
            return super().remaining()

    def dial(number: int) -> None:
        try:
            with dialling.turn(address, Watched(SOON_S)):
                dialled.append(number)
        except PeerLostError as error:
            found.append(error)

    threads = [threading.Thread(target=dial, args=(number,)) for number in range(5)]
    with suppress(PeerLostError), dialling.turn(address, Patience(SOON_S)):
        for thread in threads:
            thread.start()
        for _ in threads:
            assert waiting.acquire(timeout=SOON_S)
        raise PeerLostError("nobody there")
    for thread in threads:
        thread.join(SOON_S)
    assert dialled == []
    assert [str(error) for error in found] == ["nobody there"] * 5
    assert len({id(error) for error in found}) == 5  # each raises its own
    dial(9)  # who comes later tries again
    assert dialled == [9]


def test_waiting_for_another_one_to_dial_has_a_deadline_and_can_be_cancelled() -> None:
    dialling, address = Dialling(), address_of("127.0.0.1:9")
    cancelled = Patience(SOON_S)
    cancelled.cancelled = True
    with dialling.turn(address, Patience(SOON_S)):
        with pytest.raises(StalledError, match="no connection within 0"), dialling.turn(address, Patience(0)):
            pass
        with pytest.raises(TransferCancelled), dialling.turn(address, cancelled):
            pass


def test_a_failure_for_want_of_time_is_nobody_elses() -> None:
    dialling, address = Dialling(), address_of("127.0.0.1:9")
    with pytest.raises(StalledError), dialling.turn(address, Patience(0)):
        raise StalledError("no time")
    assert dialling._failures == 0
