"""Memory of real processes: none left, held on to, given back."""

from __future__ import annotations

import signal

import pytest

from tests.checkpoint.children import Children, await_state
from tests.transfer.children import NAME, array, peers
from tests.transfer.scene import OPTIONS, TCP, TREE

pytestmark = pytest.mark.process


def test_no_memory_at_prepare(children: Children) -> None:
    large = [array("w", (32 << 20,))]  # 128 MiB
    source, target = peers(children, 2, **TCP)
    source.publish(large, 1)
    baseline = target.usage()
    target.do("limit", more_bytes=100 << 20)
    line = target.ask("prepare", plan="p", peers=[source.address], name=NAME, arrays=large, rank=0)
    if line["saw"] == "prepared":  # memory may be taken at the first run
        line = target.pull(1, plan="p")
    assert line["saw"] == "error", line
    assert "memory" in line["text"].lower(), line
    target.do("limit", more_bytes=None)
    target.settled({**baseline, "threads": 100, "fds": [""] * 100})
    target.prepare([source.address], large, plan="q")
    target.pulled(1, plan="q")


def test_no_memory_for_another_buffer_in_a_run(children: Children) -> None:
    """All buffers are in use by trees that somebody holds, and there is no memory for one more."""
    large = [array("w", (16 << 20,))]  # 64 MiB
    source, target = peers(children, 2, **TCP)
    source.publish(large, 1)
    target.prepare([source.address], large)
    target.pulled(1, keep=True)
    target.pulled(1, keep=True)
    target.do("limit", more_bytes=40 << 20)
    line = target.pull(1)
    assert line["saw"] == "error", line
    assert "memory" in line["text"].lower(), line
    target.do("limit", more_bytes=None)
    target.serves(1)
    target.pulled(1, keep=True)
    assert target.do("check_kept")["wrong"] == []


def test_trees_that_somebody_holds_never_change(children: Children) -> None:
    source, target = peers(children, 2, **OPTIONS)
    for version in range(1, 7):
        source.publish(TREE, version)
        if version == 1:
            target.prepare([source.address], TREE)
        target.pulled(version, keep=version % 2 == 0)
    assert target.do("check_kept")["wrong"] == []
    baseline = target.usage()
    for version in range(7, 27):
        source.publish(TREE, version)
        target.pulled(version)
    target.settled(baseline)


def test_a_released_version_gives_its_memory_back(children: Children) -> None:
    large = [array("w", (8 << 20,))]  # 32 MiB
    source, target = peers(children, 2, **TCP)
    source.publish(large, 1)
    target.prepare([source.address], large)
    target.pulled(1)
    baseline = source.usage()
    for version in range(2, 5):
        source.publish(large, version)
        source.do("release", name=NAME, version=version - 1)
        target.pulled(version)
        source.settled(baseline, slack_bytes=8 << 20)


def test_a_lease_that_runs_out_gives_the_memory_back(children: Children) -> None:
    """A target that is stopped in a run holds a version no longer than its lease."""
    large = [array("w", (16 << 20,))]
    source, target = peers(children, 2, **{**TCP, "idle_s": 20.0, "first_byte_s": 20.0})
    empty = source.usage()
    source.publish([array("w", (4,))], 1, name="small")
    source.publish(large, 1)
    target.prepare([source.address], large)
    target.do("arm", faults_text="transfer.chunk.received:stop@3")
    target.send("run", plan="plan", version=1)
    await_state(target.pid, "T")
    source.do("lapse", name=NAME, version=1)
    source.settled(
        {**empty, "threads": 100, "fds": [""] * 100, "memfds": 100, "mapped": 100},
        slack_bytes=20 << 20,
        timeout_s=20.0,
    )
    target.kill(signal.SIGCONT)
    line = target.answer()
    if line["saw"] == "running":
        line = target.ask("wait")
    assert line["saw"] == "error", line
    assert line["kind"] in ("VersionGoneError", "PeerLostError"), line
    source.publish(large, 2)
    target.pulled(2)
