"""Worlds of two real workers: a real coordinator, the real host of worlds, gloo on loopback."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.coord import Changed, CoordClient
from holdfast.supervise.environment import world_environment
from tests.checkpoint.children import Child, Children, open_files
from tests.coord.coordinator_process import CoordinatorProcess
from tests.vault.nodes import await_that

pytestmark = pytest.mark.process


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    with CoordinatorProcess(tmp_path / "coord", "--run", "demo") as process:
        yield process


class Place:
    """Starts the processes of one run."""

    def __init__(self, children: Children, coordinator: CoordinatorProcess, folder: Path) -> None:
        self._children = children
        self._env = {
            "HOLDFAST_COORD": coordinator.address,
            "HOLDFAST_RUN": "demo",
            "HOLDFAST_NODE": "0",
            "HOLDFAST_FOLDER": str(folder),
        }
        self._world = world_environment(2, nproc=1, given={})

    def host(self) -> Child:
        host = self._children.python("-m", "holdfast.jax.worlds", **self._env)
        assert host.line() == {"ready": True, "pid": host.pid}
        return host

    def workers(self, *words: str) -> list[Child]:
        command = ("-m", "tests.jax.world_worker", *words)
        started = [self._children.python(*command, **self._env, **self._world) for _ in range(2)]
        for worker in started:
            worker.until("imported")
        return started


@pytest.fixture
def place(children: Children, coordinator: CoordinatorProcess, tmp_path: Path) -> Place:
    return Place(children, coordinator, tmp_path)


def seat(workers: list[Child], attempt: int, replica: int = 0) -> None:
    for index, worker in enumerate(workers):
        worker.tell(f"{replica} {index} {attempt} {len(workers)}")


def check_sums(workers: list[Child]) -> None:
    for index, worker in enumerate(workers):
        line = worker.until("sum")
        assert line["value"] == 3.0
        assert line.get("process", index) == index


def leave(workers: list[Child]) -> None:
    for worker in workers:
        worker.tell("leave")
    for worker in workers:
        worker.until("left")
        assert worker.end() == 0, worker.errors()


def await_gone(coordinator: CoordinatorProcess, key: str) -> None:
    """Wait until nobody holds a key."""
    changes: queue.SimpleQueue[Changed] = queue.SimpleQueue()
    with CoordClient(coordinator.address, run="demo") as client, client.watch(key, changes.put):
        values = {item.key: item.value for item in changes.get(timeout=20.0).items}
        while values.get(key) is not None:
            values.update((item.key, item.value) for item in changes.get(timeout=20.0).items)


def sockets(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "coord").glob("world-*.sock"))


def test_a_killed_worker_s_world_is_replaced_by_warm_processes(
    place: Place, coordinator: CoordinatorProcess, tmp_path: Path
) -> None:
    host = place.host()
    first, second = place.workers(), place.workers()
    seat(first, attempt=0)
    check_sums(first)
    assert sockets(tmp_path) == ["world-0-0-0.sock"]

    began = time.monotonic()
    first[1].kill()
    assert first[1].end() == -signal.SIGKILL
    # What the conductor does: the other one goes too, and both seats are given to parked processes.
    first[0].kill()
    seat(second, attempt=1)
    check_sums(second)
    seconds = time.monotonic() - began
    print(f"kill to first sum of the new world: {seconds:.2f} s")
    assert seconds < 20.0

    # The old service ends, the new one goes on; and the coordinator may come and go meanwhile.
    await_gone(coordinator, "world/at/0/0")
    coordinator.kill()
    coordinator.start()
    for worker in second:
        worker.tell("sum")
    check_sums(second)
    leave(second)
    await_that(lambda: "world-0-0-0.sock" not in sockets(tmp_path), "the old service is still there")
    assert sockets(tmp_path) in ([], ["world-0-0-1.sock"])
    host.kill(signal.SIGTERM)
    assert host.end() == 0, host.errors()
    assert sockets(tmp_path) == []


def test_a_survivor_is_not_aborted_and_its_sockets_are_on_loopback(place: Place) -> None:
    place.host()
    workers = place.workers()
    seat(workers, attempt=0)
    check_sums(workers)
    listening = listeners(workers[0].pid)
    assert listening
    assert all(address == "0100007F" for address in listening)
    workers[1].kill()
    workers[1].end()
    # The sum fails, by an exception that can be caught; the process is not aborted.
    workers[0].tell("sum")
    assert workers[0].end() == 1
    assert "Gloo all-reduce failed" in workers[0].errors()


def listeners(pid: int) -> list[str]:
    """The addresses at which a process listens, as in /proc/net/tcp: hex, in network order."""
    inodes = {name[8:-1] for name in open_files(pid) if name.startswith("socket:[")}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    rows += [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]


def test_a_killed_host_takes_its_worlds_along_and_is_replaced(place: Place) -> None:
    host = place.host()
    workers = place.workers()
    seat(workers, attempt=0)
    check_sums(workers)
    host.kill()
    for worker in workers:  # JAX ends them all when the service is gone
        assert worker.end() == -signal.SIGABRT
    host = place.host()
    again = place.workers()
    seat(again, attempt=1)
    check_sums(again)
    leave(again)


def test_a_folder_too_deep_for_a_socket(
    children: Children, coordinator: CoordinatorProcess, tmp_path: Path
) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    place = Place(children, coordinator, deep)
    host = place.host()
    with CoordClient(coordinator.address, run="demo") as client:
        client.set("world/want/0/3/7", b"1")
        address = client.wait("world/at/3/7", 20.0)
        assert address.startswith(b"unix-abstract:holdfast-")
        # Whoever has read the address and not connected yet finds the next host there.
        host.kill()
        host.end()
        client.delete("world/at/3/7")
        place.host()
        assert client.wait("world/at/3/7", 20.0) == address
    assert os.listdir(deep) == ["coord"]


def test_the_next_attempt_loads_what_the_first_compiled(place: Place, tmp_path: Path) -> None:
    place.host()
    first, second = place.workers(), place.workers("rehearse")
    folder = tmp_path / "bundles"

    def step(workers: list[Child]) -> list[dict[str, object]]:
        for worker in workers:
            worker.tell(f"step {folder}")
        return [worker.until("step") for worker in workers]

    seat(first, attempt=0)
    check_sums(first)
    fresh = step(first)
    assert sorted(str(line["source"]) for line in fresh) == ["bundle", "compiler"]
    began = time.monotonic()
    for worker in first:
        worker.kill()
    seat(second, attempt=1)
    check_sums(second)
    loaded = step(second)
    print(f"kill to a step out of a bundle: {time.monotonic() - began:.2f} s")
    assert [line["source"] for line in loaded] == ["bundle", "bundle"]
    assert {line["digest"] for line in (*fresh, *loaded)} == {fresh[0]["digest"]}
    assert [line["bits"] for line in fresh] == [line["bits"] for line in loaded]
    leave(second)


def test_a_host_that_the_coordinator_forgot_comes_again_with_its_services(
    place: Place, coordinator: CoordinatorProcess, tmp_path: Path
) -> None:
    """The coordinator loses its disk: nobody knows the host or its keys, and its services must not close."""
    host = place.host()
    with CoordClient(coordinator.address, run="demo") as client:
        client.set("world/want/0/2/5", b"1")
        address = client.wait("world/at/2/5", 20.0)
    coordinator.kill()
    shutil.rmtree(tmp_path / "coord" / "log")
    coordinator.start()
    with CoordClient(coordinator.address, run="demo") as client:
        assert client.wait("world/at/2/5", 20.0) == address
        client.set("world/want/0/2/6", b"1")
        assert client.wait("world/at/2/6", 20.0) != address
    await_gone(coordinator, "world/at/2/5")
    host.kill(signal.SIGTERM)
    assert host.end() == 0, host.errors()
    assert sockets(tmp_path) == []
