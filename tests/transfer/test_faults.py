"""Real processes, killed, stopped, failing and cancelled at every stage.

Every time: an error in time that says what happened, the old version whole and in service, nothing left
behind, and the next run works once the fault is gone.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable
from typing import Any

import pytest

from tests.checkpoint.children import TIMEOUT_S, Children, await_state
from tests.transfer.children import NAME, PROMPT_S, PeerProcess
from tests.transfer.scene import (
    IDLE_S,
    OPTIONS,
    SHARED,
    SLACK_S,
    TCP,
    TREE,
    Death,
    Scene,
    ended,
    failed,
)

pytestmark = pytest.mark.process

AT_SOURCE = {
    "describe": "transfer.describe",
    "prepare": "transfer.prepare",
    "run": "transfer.run",
    "chunk": "transfer.chunk.sent",
    "done": "transfer.done",
}
AT_TARGET = {
    "describe": "transfer.describe",
    "prepare": "transfer.prepare",
    "run": "transfer.run",
    "chunk": "transfer.chunk.received",
    "commit": "transfer.commit",
    "done": "transfer.done",
}

FULL_SHARED = pytest.mark.parametrize(
    "options", [TCP, pytest.param(OPTIONS, marks=pytest.mark.full)], ids=["tcp", "same node"]
)


def in_turn(stages: Iterable[str]) -> pytest.MarkDecorator:
    """Each stage over one of the transports, in turn, in every run of the tests; over both in a full one."""
    found = [
        pytest.param(options, stage, id=f"{stage}-{name}", marks=() if at % 2 == turn else pytest.mark.full)
        for at, stage in enumerate(stages)
        for turn, (name, options) in enumerate((("tcp", TCP), ("same node", OPTIONS)))
    ]
    return pytest.mark.parametrize(("options", "stage"), found)


def rule(sites: dict[str, str], stage: str, action: str) -> str:
    at = f"@{3 if stage == 'chunk' else 1}"
    # A stop takes a moment to reach every thread: none must go on meanwhile.
    more = f";{sites[stage]}:delay=0.05{at}+" if action == "stop" else ""
    return f"{sites[stage]}:{action}{at}{more}"


# --- death ---


@in_turn(AT_SOURCE)
def test_the_source_is_killed(children: Children, options: dict[str, Any], stage: str) -> None:
    scene = Scene(children, options)
    death = Death(scene.source.pid)
    scene.source.do("arm", faults_text=rule(AT_SOURCE, stage, "kill"))
    line = scene.attempt(stage)
    if stage == "done":  # the target was through already
        assert line["saw"] == "committed", line
        death.at()
        failed(scene.target.pull(2), "PeerLostError")
        scene.target.serves(2)
    else:
        failed(line, "PeerLostError", scene.address.removeprefix("tcp://"))
        assert ended(line) - death.at() < PROMPT_S
        scene.target.serves(1)
    scene.restart_source(3)
    scene.works_again(3)


@in_turn(AT_TARGET)
def test_the_target_is_killed(children: Children, options: dict[str, Any], stage: str) -> None:
    """The source goes on, knows that it does not know the outcome, and gives the memory back."""
    scene = Scene(children, options)
    death = Death(scene.target.pid)
    scene.target.do("arm", faults_text=rule(AT_TARGET, stage, "kill"))
    if stage in ("describe", "prepare"):
        scene.target.send("prepare", plan="other", peers=[scene.address], name=NAME, arrays=TREE, rank=0)
    else:
        scene.target.send("run", plan="plan", version=2)
    death.at()
    wanted = [] if stage in ("describe", "prepare") else ["unknown"]
    ends = time.monotonic() + PROMPT_S
    while (seen := scene.source.do("targets", name=NAME, version=2)["outcomes"]) != wanted:
        assert time.monotonic() < ends, seen
    scene.target = PeerProcess(children, **options).started()
    scene.target.prepare([scene.address], TREE)
    scene.target.pulled(2)
    scene.target.child.close()
    scene.source.do("release", name=NAME, version=2)
    scene.source.settled(scene.source_baseline)


def test_a_source_that_closes_its_endpoint(children: Children) -> None:
    scene = Scene(children, TCP)
    scene.source.do("announce", site="transfer.chunk.sent", nth=3)
    scene.target.do("arm", faults_text="transfer.chunk.received:delay=0.1@1+")
    scene.target.do("run", plan="plan", version=2)
    scene.source.child.until("site")
    scene.source.do("close")
    closed = time.monotonic()
    line = scene.target.ask("wait")
    failed(line, "PeerLostError")
    assert ended(line) - closed < PROMPT_S
    scene.target.serves(1)


def test_a_target_that_closes_its_endpoint_in_a_run(children: Children) -> None:
    scene = Scene(children, TCP)
    scene.target.do("arm", faults_text="transfer.chunk.received:delay=0.5@1+")
    scene.target.do("run", plan="plan", version=2)
    scene.target.do("close")
    line = scene.target.ask("wait")
    assert line["saw"] == "error", line
    usage = scene.target.usage()
    assert (usage["threads"], usage["memfds"], usage["mapped"]) == (1, 0, 0), usage
    assert not any("socket" in name for name in usage["fds"]), usage["fds"]


@SHARED
def test_nothing_remains_after_close(children: Children, options: dict[str, Any]) -> None:
    scene = Scene(children, options)
    scene.target.pulled(2)
    for peer in (scene.target, scene.source):
        peer.do("close")
        usage = peer.usage()
        assert (usage["threads"], usage["memfds"], usage["mapped"]) == (1, 0, 0), usage
        assert not any("socket" in name or "anon_inode" in name for name in usage["fds"]), usage["fds"]


# --- a stopped process ---

STOPS = [
    pytest.param(TCP, "chunk", id="tcp-chunk"),
    pytest.param(OPTIONS, "chunk", id="same node-chunk"),
    pytest.param(TCP, "run", id="tcp-run", marks=pytest.mark.full),
    pytest.param(TCP, "describe", id="tcp-describe"),
    pytest.param(TCP, "prepare", id="tcp-prepare", marks=pytest.mark.full),
    pytest.param(TCP, "done", id="tcp-done", marks=pytest.mark.full),
    pytest.param(OPTIONS, "run", id="same node-run", marks=pytest.mark.full),
    pytest.param(OPTIONS, "describe", id="same node-describe", marks=pytest.mark.full),
    pytest.param(OPTIONS, "prepare", id="same node-prepare", marks=pytest.mark.full),
    pytest.param(OPTIONS, "done", id="same node-done", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("options", "stage"), STOPS)
def test_the_source_is_stopped(children: Children, options: dict[str, Any], stage: str) -> None:
    """Nobody closes a socket: only the deadline can tell."""
    scene = Scene(children, options)
    scene.source.do("arm", faults_text=rule(AT_SOURCE, stage, "stop"))
    began = time.monotonic()
    line = scene.attempt(stage)
    if stage == "done":
        assert line["saw"] == "committed", line
        await_state(scene.source.pid, "T")
        began = time.monotonic()
        line = scene.target.pull(2)
    failed(line, "StalledError", scene.address.removeprefix("tcp://"))
    assert 0.8 * IDLE_S < ended(line) - began < IDLE_S + SLACK_S
    scene.target.serves(2 if stage == "done" else 1)
    scene.source.kill(signal.SIGCONT)
    scene.source.do("arm", faults_text="")
    scene.works_again()


@pytest.mark.parametrize(
    ("options", "stage"),
    [*STOPS, pytest.param(TCP, "commit", id="tcp-commit", marks=pytest.mark.full)],
)
def test_the_target_is_stopped(children: Children, options: dict[str, Any], stage: str) -> None:
    """The source serves others meanwhile; the one that was stopped goes on afterwards."""
    scene = Scene(children, options)
    other = PeerProcess(children, **options)
    scene.target.do("arm", faults_text=rule(AT_TARGET, stage, "stop"))
    if stage in ("describe", "prepare"):
        scene.target.send("prepare", plan="other", peers=[scene.address], name=NAME, arrays=TREE, rank=0)
    else:
        scene.target.send("run", plan="plan", version=2)
    await_state(scene.target.pid, "T")
    other.started().prepare([scene.address], TREE)
    other.pulled(2)
    other.child.close()
    scene.target.kill(signal.SIGCONT)
    line = scene.target.answer()
    if line["saw"] == "running":
        line = scene.target.ask("wait")
    assert line["saw"] in ("committed", "prepared", "error"), line
    if line["saw"] == "error":
        scene.target.serves(1)
    scene.target.do("arm", faults_text="")
    scene.works_again()


# --- an exception inside ---

RAISED = {("source", "describe"), ("source", "chunk"), ("target", "run"), ("target", "commit")}
"""One for each thread that may meet it, in every run of the tests."""


@pytest.mark.parametrize("action", ["raise", pytest.param("eio", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("end", "stage"),
    [
        pytest.param(end, stage, marks=() if (end, stage) in RAISED else pytest.mark.full)
        for end, sites in (("source", AT_SOURCE), ("target", AT_TARGET))
        for stage in sites
    ],
)
@FULL_SHARED
def test_an_exception_at_any_stage(
    children: Children, options: dict[str, Any], end: str, stage: str, action: str
) -> None:
    """Whatever goes wrong in either process: the run ends, with an error, and the threads live on."""
    scene = Scene(children, options)
    peer, sites = (scene.source, AT_SOURCE) if end == "source" else (scene.target, AT_TARGET)
    peer.do("arm", faults_text=rule(sites, stage, action))
    began = time.monotonic()
    line = scene.attempt(stage)
    assert time.monotonic() - began < IDLE_S + SLACK_S
    assert line["saw"] == ("committed" if stage == "done" else "error"), line
    scene.target.serves(2 if stage == "done" else 1)
    scene.works_again()


# --- cancelling ---


@pytest.mark.parametrize(
    ("site", "nth"),
    [
        ("transfer.run", 1),
        pytest.param("transfer.chunk.received", 1, marks=pytest.mark.full),
        ("transfer.chunk.received", 5),
        # Of sixteen chunks, which over shared memory are told of in ten messages.
        pytest.param("transfer.chunk.received", 9, marks=pytest.mark.full),
        ("transfer.commit", 1),
    ],
)
@SHARED
def test_cancelled_at(children: Children, options: dict[str, Any], site: str, nth: int) -> None:
    scene = Scene(children, options)
    scene.target.do("run", plan="plan", version=2, cancel_at=[site, nth])
    line = scene.target.ask("wait")
    if site == "transfer.commit" and line["saw"] == "committed":
        # Too late is a fair answer, if it is the truth.
        assert line["wrong"] == []
        scene.target.serves(2)
    else:
        failed(line, "TransferCancelled")
        scene.target.serves(1)
    scene.works_again()
    ends = time.monotonic() + TIMEOUT_S
    while "committed" not in (seen := scene.source.do("targets", name=NAME, version=2)["outcomes"]):
        assert time.monotonic() < ends, seen


def test_cancelled_at_once_and_afterwards(children: Children) -> None:
    scene = Scene(children, TCP)
    for _ in range(20):
        scene.target.do("run", plan="plan", version=2)
        scene.target.do("cancel")
        line = scene.target.ask("wait")
        assert line["saw"] == "committed" or line["kind"] == "TransferCancelled", line
    scene.target.do("run", plan="plan", version=2, run="late")
    line = scene.target.do("wait", run="late")
    assert line["wrong"] == []
    scene.works_again()


def test_cancelled_while_it_waits_for_a_version(children: Children) -> None:
    scene = Scene(children, TCP)
    scene.target.do("run", plan="plan", version=3)
    scene.target.do("cancel")
    line = scene.target.ask("wait")
    failed(line, "TransferCancelled")
    scene.works_again()


def test_waiting_longer_than_idle_for_a_version_is_no_stall(children: Children) -> None:
    """A source that is alive says so while a version is not there yet."""
    scene = Scene(children, TCP)
    scene.target.do("run", plan="plan", version=3)
    began = time.monotonic()
    threading.Event().wait(1.5 * IDLE_S)
    scene.source.publish(TREE, 3)
    line = scene.target.ask("wait")
    assert (line["saw"], line["wrong"]) == ("committed", []), line
    assert ended(line) - began >= IDLE_S
