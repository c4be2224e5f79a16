"""The sync face over real sockets: threads, callbacks, deadlines, lost connections, forks, and its end."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from holdfast.coord import messages as m
from holdfast.coord.client import CoordClient
from holdfast.coord.settings import Settings
from holdfast.coord.threaded import Engine
from holdfast.errors import (
    BarrierTimeoutError,
    CoordError,
    DeadlineError,
    FencedError,
    HandshakeError,
    KeyExistsError,
    LimitError,
    UnreachableError,
    UsageError,
)
from tests.checkpoint.children import open_files
from tests.coord.coordinator_process import CoordinatorProcess
from tests.coord.memory_coordinator import MemoryCoordinator

TOKEN = b"0123456789abcdef"
SOON_S = 10.0


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[MemoryCoordinator]:
    before = set(threading.enumerate())
    with MemoryCoordinator(tmp_path, token=TOKEN) as coordinator:
        yield coordinator
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert left == [], "a client has left threads behind"


@pytest.fixture
def client(coordinator: MemoryCoordinator) -> Iterator[CoordClient]:
    with CoordClient(coordinator.address, token=TOKEN, name="one") as client:
        yield client


def eventually(look: Callable[[], bool], timeout_s: float = SOON_S) -> None:
    """Wait for something that no event tells of."""
    ends = time.monotonic() + timeout_s
    pause = threading.Event()
    while not look():
        assert time.monotonic() < ends, "it did not happen in time"
        pause.wait(0.005)


# ---- calls


def test_every_call_about_keys(client: CoordClient) -> None:
    assert client.get("a") is None
    first = client.set("a", b"1")
    assert client.set("a", b"2") > first
    assert client.get("a") == b"2"
    with pytest.raises(KeyExistsError, match="'a' exists"):
        client.set("a", b"3", create=True)
    assert client.swap("a", b"1", b"4") == m.Swapped(False, b"2", first + 1)
    assert client.swap("a", b"2", b"4").done
    assert client.swap("b", None, b"5").done
    assert [client.add("n"), client.add("n", 41), client.add("n", -2)] == [1, 42, 40]
    assert client.scan("") == {"a": b"4", "b": b"5", "n": b"40"}
    assert client.delete("a") == 1
    assert client.delete("a") == 0
    assert client.delete("", prefix=True) == 2
    assert client.wait("c", 0.0) if client.set("c", b"x") else False
    with pytest.raises(DeadlineError, match="'nobody' was not set in time"):
        client.wait("nobody", 0.05)


def test_a_scan_of_many_keys_comes_in_pages(client: CoordClient) -> None:
    keys = {f"k/{i:05}": b"%d" % i for i in range(1234)}
    for key, value in keys.items():
        client.set(key, value)
    assert client.scan("k/") == keys


def test_members_meet(tmp_path: Path) -> None:
    settings = Settings(min_size=3, max_size=3, reconnect_s=2.0)
    with MemoryCoordinator(tmp_path, settings) as coordinator, ThreadPoolExecutor(3) as pool:
        clients = [CoordClient(coordinator.address, name=f"n{i}") for i in range(3)]
        joined = list(pool.map(lambda c: c.join(timeout_s=SOON_S), clients))
        assert sorted(j.slot for j in joined) == [0, 1, 2]
        assert {(c.generation, c.slot) for c in clients} == {(1, 0), (1, 1), (1, 2)}
        assert len({met.epoch for met in pool.map(lambda c: c.barrier("x"), clients)}) == 1
        votes = list(pool.map(lambda c: c.vote("v", c.slot != 1, note=b"%d" % c.slot), clients))
        assert [vote.ok for vote in votes] == [False] * 3
        assert dict(votes[0].notes) == {0: b"0", 1: b"1", 2: b"2"}
        live = {c.slot: c.incarnation for c in clients}
        assert list(pool.map(lambda c: c.live("l"), clients)) == [live] * 3
        assert [member.name for member in clients[0].roster().members] == [
            f"n{clients.index(c)}" for c in sorted(clients, key=lambda c: c.slot)
        ]
        assert clients[0].status().generation == 1
        list(pool.map(lambda c: c.finish(SOON_S), clients))
        list(pool.map(CoordClient.close, clients))


def test_many_threads_share_a_client(client: CoordClient) -> None:
    with ThreadPoolExecutor(16) as pool:
        counts = list(pool.map(lambda _: client.add("n"), range(500)))
    assert sorted(counts) == list(range(1, 501))


def test_a_value_that_is_too_large_harms_nobody(client: CoordClient) -> None:
    with pytest.raises(LimitError, match="a value of"):
        client.set("k", bytes(2 << 20))
    with pytest.raises(LimitError, match="the coordinator takes"):
        client.set("k", bytes(20 << 20))
    assert client.set("k", b"small")
    assert client.get("k") == b"small"


def test_large_values_in_both_directions(client: CoordClient) -> None:
    """More than a socket takes at once."""
    value = os.urandom(1 << 20)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: client.set(f"k{i}", value), range(16)))
        assert all(pool.map(lambda i: client.get(f"k{i}") == value, range(16)))


# ---- deadlines


def test_a_deadline_holds_while_the_coordinator_is_silent(
    coordinator: MemoryCoordinator, client: CoordClient
) -> None:
    client.join(timeout_s=SOON_S)
    coordinator.mute = lambda answer: answer.seq > 0
    began = time.monotonic()
    with pytest.raises(UnreachableError, match="no coordinator answered Put 'k' in time"):
        client.set("k", b"", timeout_s=0.2)
    assert 0.2 <= time.monotonic() - began < 2.0
    with pytest.raises(UnreachableError, match="Meet 'b'"):
        client.barrier("b", timeout_s=0.1)


def test_a_barrier_times_out_with_the_names_of_the_missing(tmp_path: Path) -> None:
    settings = Settings(min_size=2, max_size=2, reconnect_s=5.0)
    with MemoryCoordinator(tmp_path, settings) as coordinator:
        first, second = (CoordClient(coordinator.address, name=name) for name in ("ann", "bob"))
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda c: c.join(timeout_s=SOON_S), (first, second)))
        began = time.monotonic()
        with pytest.raises(BarrierTimeoutError, match="bob"):
            first.barrier("b", timeout_s=0.2)
        assert 0.15 <= time.monotonic() - began < SOON_S
        with pytest.raises(BarrierTimeoutError, match="bob"):
            second.barrier("b", timeout_s=SOON_S)
        first.close()
        second.close()


def test_nobody_there_at_all(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(UnreachableError, match=r"within 2 s: .*No such file"):
        CoordClient(f"unix:{tmp_path}/none", connect_timeout_s=2.0)
    with pytest.raises(UnreachableError, match=r"file:.*No such file"):
        CoordClient(f"file:{tmp_path}/none", connect_timeout_s=2.0)
    assert time.monotonic() - began < 30.0


def test_a_listener_that_says_nothing(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/mute")
        listener.listen(4)
        began = time.monotonic()
        with pytest.raises(UnreachableError):
            CoordClient(f"unix:{tmp_path}/mute", connect_timeout_s=0.2)
        assert time.monotonic() - began < 3.0, "closing must not wait for a handshake"


def test_a_wrong_token_is_said_at_once(coordinator: MemoryCoordinator) -> None:
    began = time.monotonic()
    with pytest.raises(HandshakeError):
        CoordClient(coordinator.address, token=b"another-token-of-16")
    with pytest.raises(HandshakeError):
        CoordClient(coordinator.address)
    with pytest.raises(HandshakeError, match="another run is served here"):
        CoordClient(coordinator.address, token=TOKEN, run="other")
    assert time.monotonic() - began < 5.0


def test_the_first_address_that_answers_is_taken(coordinator: MemoryCoordinator, tmp_path: Path) -> None:
    found = tmp_path / "found"
    found.write_text(f"tcp://127.0.0.1:1\n\n{coordinator.address}\n")
    for addresses in ([f"unix:{tmp_path}/none", coordinator.address], [f"file:{found}"]):
        with CoordClient(addresses, token=TOKEN) as client:
            assert client.set("k", b"")


# ---- lost connections


def test_a_lost_connection_is_made_again(coordinator: MemoryCoordinator, client: CoordClient) -> None:
    for value in range(20):
        coordinator.break_all()
        assert client.add("n") == value + 1
    assert client.sid == 1


def test_a_call_whose_answer_was_lost_is_carried_out_once(
    coordinator: MemoryCoordinator, client: CoordClient
) -> None:
    lost = threading.Event()

    def lose(answer: m.Answer) -> bool:
        if isinstance(answer.body, m.Count) and not lost.is_set():
            lost.set()
            return True
        return False

    coordinator.mute = lose
    with ThreadPoolExecutor(1) as pool:
        adding = pool.submit(client.add, "n")
        assert lost.wait(SOON_S)
        coordinator.break_all()
        assert adding.result(SOON_S) == 1
    assert client.get("n") == b"1"
    repeated = [call.seq for call in coordinator.seen if isinstance(call.op, m.Add)]
    assert len(repeated) == 2
    assert len(set(repeated)) == 1


def test_a_restart_with_open_calls(coordinator: MemoryCoordinator, client: CoordClient) -> None:
    client.join(timeout_s=SOON_S)
    with ThreadPoolExecutor(4) as pool:
        waits = [pool.submit(client.wait, f"k{i}", SOON_S) for i in range(3)]
        eventually(lambda: sum(isinstance(call.op, m.Get) for call in coordinator.seen) >= 3)
        coordinator.stop()
        adding = pool.submit(client.add, "n")
        coordinator.start()
        assert adding.result(SOON_S) == 1
        for i in range(3):
            client.set(f"k{i}", b"%d" % i)
        assert [wait.result(SOON_S) for wait in waits] == [b"0", b"1", b"2"]
        assert client.barrier("still-a-member", timeout_s=SOON_S).epoch


def test_an_abandoned_barrier_is_taken_up_again(tmp_path: Path) -> None:
    settings = Settings(min_size=2, max_size=2, reconnect_s=30.0, dead_s=60.0)
    with MemoryCoordinator(tmp_path, settings) as coordinator:
        first, second = (CoordClient(coordinator.address) for _ in range(2))
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda c: c.join(timeout_s=SOON_S), (first, second)))
            coordinator.mute = lambda answer: isinstance(answer.body, m.Met)
            other = pool.submit(second.barrier, "b", timeout_s=SOON_S)
            eventually(lambda: any(isinstance(call.op, m.Meet) for call in coordinator.seen))
            with pytest.raises(UnreachableError):
                first.barrier("b", timeout_s=0.2)
            coordinator.mute = lambda answer: False
            coordinator.break_all()
            met = first.barrier("b", timeout_s=SOON_S)
            assert other.result(SOON_S) == met, "the same epoch, not the next"
            again = [pool.submit(c.barrier, "b", timeout_s=SOON_S) for c in (first, second)]
            assert len({one.result(SOON_S).epoch for one in again}) == 1
        first.close()
        second.close()


def test_a_session_that_was_forgotten_is_fenced(tmp_path: Path) -> None:
    with MemoryCoordinator(tmp_path, Settings(session_s=0.01)) as coordinator:
        client = CoordClient(coordinator.address)
        coordinator.stop()
        coordinator.start()
        threading.Event().wait(0.05)
        coordinator.break_all()
        eventually(lambda: client.is_over or _fails(client))
        with pytest.raises(FencedError):
            client.get("k")
        client.close()


def _fails(client: CoordClient) -> bool:
    try:
        client.get("k", 0.2)
    except CoordError:
        return True
    return False


# ---- pushes and callbacks


def test_a_callback_may_call_the_client(coordinator: MemoryCoordinator) -> None:
    told: queue.Queue[object] = queue.Queue()

    def on_push(push: m.Push) -> None:
        if isinstance(push, m.Trouble):
            told.put((push.message, listener.add("heard")))

    with CoordClient(coordinator.address, token=TOKEN, on_push=on_push) as listener:
        listener.join(timeout_s=SOON_S)
        with CoordClient(coordinator.address, token=TOKEN) as other:
            other.report("it hurts")
            assert told.get(timeout=SOON_S) == ("it hurts", 1)
            coordinator.break_all()
            other.report("still")
            assert told.get(timeout=SOON_S) == ("still", 2)


def test_a_callback_that_fails_does_not_end_the_others(
    coordinator: MemoryCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    told: queue.Queue[str] = queue.Queue()

    def on_push(push: m.Push) -> None:
        if isinstance(push, m.Trouble):
            told.put(push.message)
            raise ValueError("oops")

    with CoordClient(coordinator.address, token=TOKEN, on_push=on_push) as client:
        client.join(timeout_s=SOON_S)
        with CoordClient(coordinator.address, token=TOKEN) as other:
            for text in ("one", "two"):
                other.report(text)
            assert [told.get(timeout=SOON_S) for _ in range(2)] == ["one", "two"]
    assert "a callback of the coordinator's client failed" in caplog.text


def test_a_watch_sees_every_change_once_through_all_that_breaks(
    coordinator: MemoryCoordinator, client: CoordClient
) -> None:
    seen: queue.Queue[m.Changed] = queue.Queue()
    client.set("w/0", b"0")
    with client.watch("w/", seen.put):
        first = seen.get(timeout=SOON_S)
        assert first.reset
        assert [item.key for item in first.items] == ["w/0"]
        keys: list[str] = []
        for i in range(1, 40):
            client.set(f"w/{i}", b"")
            if i % 7 == 0:
                coordinator.break_all()
            if i % 20 == 0:
                coordinator.stop()
                coordinator.start()
        while len(keys) < 39:
            changed = seen.get(timeout=SOON_S)
            if changed.reset:
                keys = []
            keys += [item.key for item in changed.items if item.key != "w/0"]
        assert keys == [f"w/{i}" for i in range(1, 40)]
    client.set("w/late", b"")
    client.get("w/late")
    assert seen.empty()


def test_watches_made_at_once_share_one_thread(
    coordinator: MemoryCoordinator, client: CoordClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, dispatch = threading.Barrier(2), Engine._dispatch

    def slowly(engine: Engine) -> Callable[[], None]:
        """Looked up when a thread is made: wait for another that is being made."""
        with suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        return partial(dispatch, engine)

    monkeypatch.setattr(Engine, "_dispatch", property(slowly))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda key: client.watch(key, lambda changed: None), ("a", "b")))
    assert sum(thread.name == "holdfast-coord-callbacks" for thread in threading.enumerate()) == 1


def test_closing_from_a_callback(coordinator: MemoryCoordinator) -> None:
    closed = threading.Event()

    def on_push(push: m.Push) -> None:
        if isinstance(push, m.Trouble):
            listener.close()
            closed.set()

    listener = CoordClient(coordinator.address, token=TOKEN, on_push=on_push)
    listener.join(timeout_s=SOON_S)
    with CoordClient(coordinator.address, token=TOKEN) as other:
        other.report("go home")
        assert closed.wait(SOON_S)
    eventually(lambda: not any("coord" in t.name and "memory" not in t.name for t in threading.enumerate()))


# ---- stopping together


def test_all_stop_at_the_same_step(tmp_path: Path) -> None:
    with MemoryCoordinator(tmp_path, Settings(min_size=3, max_size=3, reconnect_s=5.0)) as coordinator:
        clients = [CoordClient(coordinator.address) for _ in range(3)]
        asked = threading.Event()

        def work(i: int) -> tuple[int, int]:
            client, begun = clients[i], -1
            client.join(timeout_s=SOON_S)
            for step in range(100_000):
                if client.reached_stop(step, SOON_S):
                    return step, begun
                begun = step
                if i == 0 and step == 50:
                    client.preempt("the machine is wanted back")
                    asked.set()
                client.get("slow")  # else a member runs free while the others wait for the interpreter
            raise AssertionError("it never stopped")

        with ThreadPoolExecutor(3) as pool:
            ends = list(pool.map(work, range(3)))
            assert asked.is_set()
            assert len({stop for stop, _ in ends}) == 1
            assert all(begun == stop - 1 for stop, begun in ends), "nobody has passed it or stopped short"
            assert {c.preempt("me too").stop for c in clients} == {2}, "done with the first, so it is another"
            list(pool.map(CoordClient.close, clients))


def test_a_stop_that_is_not_decided_has_a_deadline(tmp_path: Path) -> None:
    with (
        MemoryCoordinator(tmp_path, Settings(reconnect_s=5.0)) as coordinator,
        CoordClient(coordinator.address) as client,
    ):
        client.join(timeout_s=SOON_S)
        assert not client.reached_stop(0)
        coordinator.mute = lambda answer: isinstance(answer.body, m.Stop) and answer.body.step >= 0
        client.preempt("now")
        with pytest.raises(DeadlineError, match="was not decided within"):
            client.reached_stop(1, 0.1)


# ---- the end


def test_a_closed_client_says_so(client: CoordClient) -> None:
    client.close()
    client.close()
    with pytest.raises(UsageError, match="is closed"):
        client.get("k")


def test_closing_ends_the_calls_that_wait(coordinator: MemoryCoordinator, client: CoordClient) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.wait, "k", 60.0)
        eventually(lambda: any(isinstance(call.op, m.Get) for call in coordinator.seen))
        began = time.monotonic()
        client.close()
        with pytest.raises(CoordError):
            waiting.result(SOON_S)
        assert time.monotonic() - began < 3.0


def test_closing_without_a_coordinator_does_not_hang(tmp_path: Path) -> None:
    with MemoryCoordinator(tmp_path) as coordinator:
        client = CoordClient(coordinator.address)
        coordinator.stop()
        began = time.monotonic()
        client.close()
        assert time.monotonic() - began < 3.0


def test_leaving_is_no_death(coordinator: MemoryCoordinator, client: CoordClient) -> None:
    client.join(timeout_s=SOON_S)
    client.leave("done here")
    with pytest.raises(FencedError, match="has left the run"):
        client.get("k")


def test_nothing_is_left_behind(coordinator: MemoryCoordinator) -> None:
    CoordClient(coordinator.address, token=TOKEN).close()
    eventually(lambda: not coordinator.peers)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with CoordClient(coordinator.address, token=TOKEN, on_push=lambda push: None) as client:
            client.set("k", b"")
    # The coordinator closes its sockets a moment after it has said goodbye.
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)


@pytest.mark.process
def test_a_child_lets_go_of_its_parents_connection(coordinator: MemoryCoordinator) -> None:
    """Else the coordinator would take the child's end for the parent's."""
    with CoordClient(coordinator.address, token=TOKEN) as parent:
        sock = parent._engine._sock
        assert sock is not None
        mine = os.readlink(f"/proc/self/fd/{sock.fileno()}")
        with warnings.catch_warnings():
            # That threads and fork do not mix is the point; Python says so, and JAX if a test has loaded it.
            warnings.simplefilter("ignore")
            pid = os.fork()
        if pid == 0:
            try:
                parent.get("k")
            except UsageError:
                signal.pause()
            os._exit(1)
        try:
            eventually(lambda: mine not in open_files(pid))
            assert parent.set("k", b"still mine")
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        assert parent.get("k") == b"still mine"


# ---- a real coordinator


@pytest.mark.process
def test_nothing_is_lost_or_done_twice_when_the_coordinator_is_killed(tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path / "coord", token=TOKEN) as coordinator:
        clients = [CoordClient(coordinator.address, token=TOKEN) for _ in range(4)]
        stop = threading.Event()

        def work(client: CoordClient) -> list[int]:
            counts = []
            while not stop.is_set():
                counts.append(client.add("n", timeout_s=30.0))
            return counts

        with ThreadPoolExecutor(4) as pool:
            working = [pool.submit(work, client) for client in clients]
            for _ in range(5):
                at = clients[0].add("n", 0, timeout_s=30.0)
                eventually(lambda at=at: clients[0].add("n", 0, timeout_s=30.0) > at + 20)  # type: ignore[misc]
                coordinator.kill()
                coordinator.start()
            stop.set()
            counts = sorted(count for one in working for count in one.result(60.0))
        assert counts == list(range(1, len(counts) + 1))
        assert clients[0].get("n") == b"%d" % len(counts)
        assert len({client.sid for client in clients}) == 4
        for client in clients:
            client.close()


@pytest.mark.process
def test_barriers_go_on_when_the_coordinator_is_killed(tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path / "coord", "--min-size", "3", "--max-size", "3") as coordinator:
        clients = [CoordClient(coordinator.address) for _ in range(3)]
        rounds = threading.Semaphore(0)
        num = 300

        def work(client: CoordClient) -> list[int]:
            client.join(timeout_s=30.0)
            epochs = []
            for _ in range(num):
                epochs.append(client.barrier("b", timeout_s=30.0).epoch)
                rounds.release()
            return epochs

        with ThreadPoolExecutor(3) as pool:
            working = [pool.submit(work, client) for client in clients]
            for _ in range(4):
                for _ in range(60):
                    assert rounds.acquire(timeout=30.0)
                coordinator.kill()
                coordinator.start()
            first, second, third = (one.result(60.0) for one in working)
        assert first == second == third
        assert len(set(first)) == num, "no barrier passed twice"
        assert {client.generation for client in clients} == {1}
        for client in clients:
            client.close()


@pytest.mark.process
def test_a_coordinator_that_is_stopped_for_a_while_costs_nobody_anything(tmp_path: Path) -> None:
    with (
        CoordinatorProcess(tmp_path / "coord") as coordinator,
        CoordClient(coordinator.address) as client,
    ):
        client.join(timeout_s=30.0)
        coordinator.process.send_signal(signal.SIGSTOP)
        with pytest.raises(UnreachableError):
            client.set("k", b"1", timeout_s=0.3)
        coordinator.process.send_signal(signal.SIGCONT)
        assert client.barrier("b", timeout_s=30.0).epoch
        assert client.generation == 1
