"""A bad network between real processes: reset, silent, slow, corrupting.

Every time: an error in time, or none where none is due; never wrong bits; and the next run works.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoint.children import Children
from tests.transfer.children import NAME, PROMPT_S, Line, PeerProcess, peers
from tests.transfer.scene import CHUNK, IDLE_S, NBYTES, SLACK_S, TCP, TREE, WINDOW, Scene, ended, failed

pytestmark = pytest.mark.process


@pytest.fixture
def proxied(children: Children) -> Iterator[Scene]:
    """The two with a proxy between them, over TCP."""
    scene = Scene(children, TCP, proxied=True)
    yield scene
    assert scene.proxy is not None
    scene.proxy.close()


def test_the_connection_is_reset(proxied: Scene) -> None:
    proxy = proxied.proxy
    assert proxy is not None
    reset: list[float] = []

    def act() -> None:
        reset.append(time.monotonic())
        proxy.reset()

    proxy.at(proxy.count["down"] + NBYTES // 2, act)
    line = proxied.target.pull(2)
    failed(line, "PeerLostError", proxied.address.removeprefix("tcp://"))
    assert ended(line) - reset[0] < PROMPT_S
    proxied.target.serves(1)
    proxied.works_again()


@pytest.mark.parametrize("share", [0.0, 0.5], ids=["before the first byte", "in the middle"])
def test_the_network_swallows_everything(proxied: Scene, share: float) -> None:
    proxy = proxied.proxy
    assert proxy is not None
    proxy.at(proxy.count["down"] + int(share * NBYTES), proxy.stop_forwarding)
    began = time.monotonic()
    line = proxied.target.pull(2)
    failed(line, "StalledError", proxied.address.removeprefix("tcp://"))
    assert 0.8 * IDLE_S < ended(line) - began < IDLE_S + SLACK_S
    proxied.target.serves(1)
    proxy.forward()
    proxied.works_again()


def test_nobody_answers_at_connect(proxied: Scene) -> None:
    proxy = proxied.proxy
    assert proxy is not None
    proxy.stop_forwarding()
    newcomer = PeerProcess(proxied.children, **TCP).started()
    began = time.monotonic()
    line = newcomer.ask("prepare", plan="p", peers=[proxied.address], name=NAME, arrays=TREE, rank=0)
    failed(line, "StalledError", proxied.address.removeprefix("tcp://"))
    assert time.monotonic() - began < TCP["connect_s"] + SLACK_S
    proxy.forward()
    newcomer.prepare([proxied.address], TREE)
    newcomer.pulled(2)


def test_silence_costs_the_connection(proxied: Scene) -> None:
    """What an unanswered question left on it, half a frame perhaps, would be taken for the next answer."""
    proxy = proxied.proxy
    assert proxy is not None
    proxy.stop_forwarding()
    before = proxy.num_connections
    failed(proxied.attempt("prepare"), "StalledError", "no answer to describe")
    proxy.forward()
    proxied.target.pulled(2)
    assert proxy.num_connections > before


def test_nobody_listens_at_connect(children: Children) -> None:
    source, target = peers(children, 2, **TCP)
    source.publish(TREE, 1)
    source.child.close()
    began = time.monotonic()
    line = target.ask("prepare", plan="p", peers=[source.address], name=NAME, arrays=TREE, rank=0)
    assert line["kind"] in ("PeerLostError", "StalledError"), line
    assert source.address.removeprefix("tcp://") in line["text"]
    assert time.monotonic() - began < TCP["connect_s"] + SLACK_S


def test_a_slow_network_is_no_fault(proxied: Scene) -> None:
    """Longer than the idle deadline in all, but never that long without a byte."""
    proxy = proxied.proxy
    assert proxy is not None
    proxy.slow_down(NBYTES / 2.5)
    began = time.monotonic()
    line = proxied.target.pulled(2)
    assert ended(line) - began > IDLE_S


def test_the_whole_has_a_deadline(proxied: Scene) -> None:
    proxy = proxied.proxy
    assert proxy is not None
    proxy.slow_down(NBYTES / 20)
    began = time.monotonic()
    line = proxied.target.pull(2, deadline_s=0.7)
    failed(line, "StalledError", proxied.address.removeprefix("tcp://"))
    assert 0.6 < ended(line) - began < 0.7 + SLACK_S
    proxied.target.serves(1)
    proxy.forward()
    proxied.works_again()


def test_a_slow_reader_is_sent_no_more_than_the_window(proxied: Scene) -> None:
    """What a target has not consumed is bounded, however much it asked for."""
    proxy = proxied.proxy
    assert proxy is not None
    proxied.target.do("arm", faults_text="transfer.chunk.received:delay=0.15@1+")
    before = proxy.count["down"]
    began = time.monotonic()  # before the target begins: it cannot have consumed more than is allowed for
    proxied.target.do("run", plan="plan", version=2)
    most, tick = 0, threading.Event()
    while not tick.wait(0.002) and time.monotonic() - began < 0.5:
        down = proxy.count["down"] - before
        consumed = int((time.monotonic() - began) / 0.15 + 2) * 2 * CHUNK  # two streams
        most = max(most, down - consumed)
    assert most <= WINDOW + CHUNK, most
    line = proxied.target.do("wait")
    assert (line["saw"], line["wrong"]) == ("committed", []), line


def test_a_slow_writer_is_waited_for(children: Children) -> None:
    scene = Scene(children, TCP)
    scene.source.do("arm", faults_text="transfer.chunk.sent:delay=0.15@1+")
    scene.target.pulled(2)


# --- corruption ---


@pytest.mark.parametrize("part", ["bytes", "head"])
def test_a_chunk_is_corrupted_on_its_way(proxied: Scene, part: Any) -> None:
    proxy = proxied.proxy
    assert proxy is not None
    done = proxy.corrupt_chunk(part)
    line = proxied.target.pull(2)
    assert done.is_set()
    if part == "bytes":
        failed(line, "IntegrityError", proxied.address.removeprefix("tcp://"), "chunk")
        assert "w" in line["text"] or "u" in line["text"]
    else:
        assert line["saw"] == "error", line
    proxied.target.serves(1)
    proxied.works_again()


RECOVERED_S = 10.0
LOST = ("StalledError", "PeerLostError")


def at_last(attempt: Callable[[], Line]) -> Line:
    """What comes of it in the end: on a busy machine a process may not get to run for as long as the short
    idle deadline of these two.
    """
    ends = time.monotonic() + RECOVERED_S
    while (line := attempt())["saw"] == "error" and line["kind"] in LOST and time.monotonic() < ends:
        pass
    return line


@pytest.fixture(scope="module")
def long_lived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One pair of processes for many faults, with a target that soon gives up."""
    children = Children(tmp_path_factory.mktemp("children"))
    scene = Scene(children, TCP, proxied=True)
    scene.target.child.close()
    hasty = {**TCP, "idle_s": 0.3, "first_byte_s": 0.3, "connect_s": 0.5}
    target = scene.target = PeerProcess(children, **hasty).started()
    asked = {"plan": "plan", "peers": [scene.address], "name": NAME, "arrays": TREE, "rank": 0}
    line = at_last(lambda: target.ask("prepare", **asked))
    assert line["saw"] == "prepared", line
    assert scene.proxy is not None
    yield scene
    scene.proxy.close()
    children.end_all()


def flip_and_pull(scene: Scene, offset: int, direction: Any, reconnect: bool) -> None:
    """Pull with one byte flipped: the right bits or an error, never anything else."""
    proxy = scene.proxy
    assert proxy is not None
    if reconnect:
        proxy.reset()
    proxy.flip(proxy.count[direction] + offset, direction)
    line = scene.target.pull(2, deadline_s=5.0)
    assert line["saw"] == "error" or line["wrong"] == [], line
    proxy.forward()
    # What was damaged may be the end of that run, which is found out now, and costs the connection.
    line = at_last(lambda: scene.target.pull(2))
    assert line["saw"] == "committed", f"{line.get('kind')}: {line.get('text')}"
    assert line["wrong"] == [], line
    scene.target.serves(2)


FLIPS = given(
    offset=st.integers(0, 600) | st.integers(0, NBYTES),
    direction=st.sampled_from(["up", "down"]),
    reconnect=st.booleans(),
)
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=25, deadline=None, suppress_health_check=QUIET)
@FLIPS
def test_any_flipped_byte(long_lived: Scene, offset: int, direction: str, reconnect: bool) -> None:
    flip_and_pull(long_lived, offset, direction, reconnect)


@pytest.mark.full
@pytest.mark.timeout(800)
@settings(max_examples=500, deadline=None, suppress_health_check=QUIET)
@FLIPS
def test_many_flipped_bytes(long_lived: Scene, offset: int, direction: str, reconnect: bool) -> None:
    flip_and_pull(long_lived, offset, direction, reconnect)
