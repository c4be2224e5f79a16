"""The async face over real sockets: many clients on one loop, lost connections, deadlines, and its end."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.clock import Deadline
from holdfast.coord import messages as m
from holdfast.coord.aio import AsyncCoordClient
from holdfast.coord.settings import Settings
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
from tests.coord.coordinator_process import CoordinatorProcess
from tests.coord.memory_coordinator import MemoryCoordinator

TOKEN = b"0123456789abcdef"
SOON_S = 20.0


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[MemoryCoordinator]:
    with MemoryCoordinator(tmp_path, token=TOKEN) as coordinator:
        yield coordinator


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run it to its end, `SOON_S` at most; no task may be left over."""

    async def bounded() -> None:
        async with asyncio.timeout(SOON_S):
            await work
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks were left behind: {left}"

    asyncio.run(bounded())


def client_of(coordinator: MemoryCoordinator, **options: Any) -> AsyncCoordClient:
    return AsyncCoordClient(coordinator.address, token=TOKEN, **options)


async def in_thread(act: Any) -> None:
    """Something of the coordinator's, which lives on a thread of its own."""
    await asyncio.get_running_loop().run_in_executor(None, act)


def test_every_call_about_keys(coordinator: MemoryCoordinator) -> None:
    async def work() -> None:
        async with client_of(coordinator) as client:
            assert await client.get("a") is None
            assert await client.set("a", b"1")
            with pytest.raises(KeyExistsError):
                await client.set("a", b"2", create=True)
            assert (await client.swap("a", b"1", b"3")).done
            assert [await client.add("n"), await client.add("n", 4)] == [1, 5]
            assert await client.scan("") == {"a": b"3", "n": b"5"}
            assert await client.delete("", prefix=True) == 2
            with pytest.raises(DeadlineError, match="'nobody' was not set in time"):
                await client.wait("nobody", 0.05)
            waiting = asyncio.create_task(client.wait("k", SOON_S))
            await client.set("k", b"v")
            assert await waiting == b"v"
            assert (await client.status()).keys == 1

    run(work())


def test_many_clients_on_one_loop(tmp_path: Path) -> None:
    num = 64

    async def work() -> None:
        clients = [AsyncCoordClient(served.address, name=f"n{i}") for i in range(num)]
        await asyncio.gather(*(client.open() for client in clients))
        tasks = len(asyncio.all_tasks())
        joined = await asyncio.gather(*(client.join(timeout_s=SOON_S) for client in clients))
        assert sorted(one.slot for one in joined) == list(range(num))
        for _ in range(5):
            met = await asyncio.gather(*(client.barrier("b") for client in clients))
            assert len({one.epoch for one in met}) == 1
        votes = await asyncio.gather(*(client.vote("v", True) for client in clients))
        assert all(vote.ok for vote in votes)
        live = await asyncio.gather(*(client.live("l") for client in clients))
        assert all(one == {c.slot: c.incarnation for c in clients} for one in live)
        assert len(asyncio.all_tasks()) == tasks, "a client needs no task while it is connected"
        await asyncio.gather(*(client.finish() for client in clients))
        await asyncio.gather(*(client.close() for client in clients))

    with MemoryCoordinator(tmp_path, Settings(min_size=num, max_size=num)) as served:
        run(work())


def test_calls_of_one_turn_go_out_together(coordinator: MemoryCoordinator) -> None:
    async def work() -> None:
        async with client_of(coordinator) as client:
            counts = await asyncio.gather(*(client.add("n") for _ in range(1000)))
            assert sorted(counts) == list(range(1, 1001))

    run(work())


def test_a_lost_connection_is_made_again(coordinator: MemoryCoordinator) -> None:
    async def work() -> None:
        async with client_of(coordinator) as client:
            for value in range(10):
                await in_thread(coordinator.break_all)
                assert await client.add("n") == value + 1
            await in_thread(coordinator.stop)
            adding = [asyncio.create_task(client.add("n")) for _ in range(5)]
            await in_thread(coordinator.start)
            assert sorted(await asyncio.gather(*adding)) == [11, 12, 13, 14, 15]

    run(work())


def test_deadlines_hold_with_and_without_a_coordinator(coordinator: MemoryCoordinator) -> None:
    async def work() -> None:
        async with client_of(coordinator) as client:
            await client.join(timeout_s=SOON_S)
            coordinator.mute = lambda answer: answer.seq > 0
            began = time.monotonic()
            with pytest.raises(UnreachableError, match="Put 'k'"):
                await client.set("k", b"", timeout_s=0.2)
            assert 0.2 <= time.monotonic() - began < 2.0
            coordinator.mute = lambda answer: False
            await in_thread(coordinator.stop)
            with pytest.raises(UnreachableError, match="in time"):
                await client.set("k", b"", timeout_s=0.2)
            await in_thread(coordinator.start)
            assert await client.set("k", b"")

    run(work())


def test_a_barrier_times_out_with_the_names_of_the_missing(tmp_path: Path) -> None:
    async def work() -> None:
        first, second = (AsyncCoordClient(served.address, name=name) for name in ("ann", "bob"))
        async with first, second:
            await asyncio.gather(first.join(timeout_s=SOON_S), second.join(timeout_s=SOON_S))
            with pytest.raises(BarrierTimeoutError, match="bob"):
                await first.barrier("b", timeout_s=0.1)

    with MemoryCoordinator(tmp_path, Settings(min_size=2, max_size=2)) as served:
        run(work())


def test_a_cancelled_barrier_is_taken_up_by_the_next_call(tmp_path: Path) -> None:
    async def work() -> None:
        first, second = (AsyncCoordClient(served.address) for _ in range(2))
        async with first, second:
            await asyncio.gather(first.join(timeout_s=SOON_S), second.join(timeout_s=SOON_S))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await first.barrier("b")
            met = await second.barrier("b")
            assert await first.barrier("b") == met
            again = await asyncio.gather(first.barrier("b"), second.barrier("b"))
            assert again[0] == again[1] != met

    with MemoryCoordinator(tmp_path, Settings(min_size=2, max_size=2)) as served:
        run(work())


def test_pushes_and_watches(coordinator: MemoryCoordinator) -> None:
    async def work() -> None:
        pushes: asyncio.Queue[m.Push] = asyncio.Queue()
        changes: asyncio.Queue[m.Changed] = asyncio.Queue()
        async with (
            client_of(coordinator, on_push=pushes.put_nowait) as client,
            client_of(coordinator) as other,
        ):
            await client.join(timeout_s=SOON_S)
            await other.report("it hurts")
            while not isinstance(push := await pushes.get(), m.Trouble):
                pass
            assert push.message == "it hurts"
            watching = await client.watch("w/", changes.put_nowait)
            assert (await changes.get()).reset
            for i in range(10):
                await other.set(f"w/{i}", b"")
                await in_thread(coordinator.break_all)
            keys: list[str] = []
            while len(keys) < 10:
                keys += [item.key for item in (await changes.get()).items]
            assert keys == [f"w/{i}" for i in range(10)]
            watching.close()
            await other.set("w/late", b"")
            await client.get("w/late")
            assert changes.empty()

    run(work())


def test_a_callback_that_fails_is_told_of(
    coordinator: MemoryCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    def on_push(push: m.Push) -> None:
        raise ValueError("oops")

    async def work() -> None:
        async with client_of(coordinator, on_push=on_push) as client:
            assert await client.set("k", b"")

    run(work())
    assert "a callback of the coordinator's client failed" in caplog.text


def test_all_stop_at_the_same_step(tmp_path: Path) -> None:
    async def member(client: AsyncCoordClient, first: bool) -> tuple[int, int]:
        await client.join(timeout_s=SOON_S)
        begun = -1
        for step in range(100_000):
            if await client.reached_stop(step):
                return step, begun
            begun = step
            if first and step == 10:
                await client.preempt("wanted back")
            await client.get("k")
        raise AssertionError("it never stopped")

    async def work() -> None:
        clients = [AsyncCoordClient(served.address) for _ in range(3)]
        await asyncio.gather(*(client.open() for client in clients))
        ends = await asyncio.gather(*(member(client, i == 0) for i, client in enumerate(clients)))
        assert len(set(ends)) == 1
        assert ends[0][1] == ends[0][0] - 1
        await asyncio.gather(*(client.close() for client in clients))

    with MemoryCoordinator(tmp_path, Settings(min_size=3, max_size=3)) as served:
        run(work())


def test_a_value_that_is_too_large_harms_nobody(coordinator: MemoryCoordinator) -> None:
    async def work() -> None:
        async with client_of(coordinator) as client:
            with pytest.raises(LimitError, match="the coordinator takes"):
                await client.set("k", bytes(20 << 20))
            assert await client.set("k", b"small")

    run(work())


def test_who_cannot_come_in(coordinator: MemoryCoordinator, tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(HandshakeError):
            await AsyncCoordClient(coordinator.address, token=b"another-token-of-16").open()
        with pytest.raises(UnreachableError, match="No such file"):
            await AsyncCoordClient(f"unix:{tmp_path}/none", connect_timeout_s=0.2).open()
        with pytest.raises(UsageError, match="is no address"):
            AsyncCoordClient("localhost:80")

    run(work())


def test_the_first_call_connects(coordinator: MemoryCoordinator, tmp_path: Path) -> None:
    async def work() -> None:
        client = client_of(coordinator)
        assert (await client.join(timeout_s=SOON_S)).slot == 0
        await client.close()
        stranger = AsyncCoordClient(coordinator.address, token=b"another-token-of-16")
        with pytest.raises(HandshakeError):
            await stranger.join(timeout_s=SOON_S)
        await stranger.close()
        nowhere = AsyncCoordClient(f"unix:{tmp_path}/none")
        with pytest.raises(UnreachableError, match="No such file"):
            await nowhere.get("k", timeout_s=0.2)
        await nowhere.close()

    run(work())


def test_the_end(coordinator: MemoryCoordinator) -> None:
    async def work() -> None:
        client = await client_of(coordinator).open()
        waiting = asyncio.create_task(client.wait("k", SOON_S))
        await asyncio.sleep(0)
        await client.close()
        await client.close()
        with pytest.raises(CoordError):
            await waiting
        with pytest.raises(UsageError, match="is closed"):
            await client.get("k")
        left = await client_of(coordinator).open()
        await left.join(timeout_s=SOON_S)
        await left.leave()
        with pytest.raises(FencedError, match="has left"):
            await left.get("k")
        await left.close()

    threads = threading.active_count()
    run(work())
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        run(work())
    # The coordinator, in this process too, sees a connection end a moment later.
    deadline = Deadline(SOON_S)
    while len(os.listdir("/proc/self/fd")) > before and not deadline.expired():
        time.sleep(0.005)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert threading.active_count() <= threads


@pytest.mark.process
def test_nothing_is_lost_or_done_twice_when_the_coordinator_is_killed(tmp_path: Path) -> None:
    async def work() -> None:
        clients = [AsyncCoordClient(served.address, token=TOKEN) for _ in range(16)]
        await asyncio.gather(*(client.open() for client in clients))
        counts: list[int] = []
        stop = False

        async def add(client: AsyncCoordClient) -> None:
            while not stop:
                counts.append(await client.add("n", timeout_s=SOON_S))

        adding = [asyncio.create_task(add(client)) for client in clients]
        for _ in range(3):
            enough = len(counts) + 200
            while len(counts) < enough:
                await asyncio.sleep(0.001)
            await in_thread(served.kill)
            await in_thread(served.start)
        stop = True
        await asyncio.gather(*adding)
        assert sorted(counts) == list(range(1, len(counts) + 1))
        await asyncio.gather(*(client.close() for client in clients))

    with CoordinatorProcess(tmp_path / "coord", token=TOKEN) as served:
        run(work())
