"""A node is lost together with its vault, and no replica holds the state: it is in the neighbour's vault."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Final

import pytest

from holdfast.journal import RunRestored, SaveDurable, SaveStaged, WorkerReplaced
from holdfast.testing.launched import LaunchedRun
from tests.recovery.mishaps import Mishap, happened, open_gate
from tests.recovery.nodes import Nodes
from tests.recovery.stage import Digests, Scene
from tests.vault.nodes import await_that

pytestmark = pytest.mark.process
full = pytest.mark.full

# In every vault the first saves come to nothing, when they have long been staged: the disk has none of it.
NO_DISK: Final = ";".join(f"vault.index.written:{what}@{n}" for n in (1, 2) for what in ("delay=0.7", "eio"))
SAVED: Final = 10
"""The newest step that is staged when the worker stands at the gate."""


def gate(at: str = "lane", *, slot: int = 0, step: int = -1, after: int = -1) -> Mishap:
    return Mishap(at=at, what="gate", slot=slot, step=step, after=after)


def await_gate(scene: Scene, number: int) -> None:
    await_that(lambda: happened(scene.out, number), f"nobody came to gate {number}")


def restored(scene: Scene) -> list[tuple[int, str]]:
    """Where states came from that no live replica had."""
    return [(one.step, one.source) for one in scene.events() if isinstance(one, RunRestored)]


def check_bits(scene: Scene, run: LaunchedRun, undisturbed: Digests) -> None:
    """It comes to the same bits. What is left then, waiting for those it has lost, is ended at once."""
    await_that(scene.finals, "there is no last state")
    run.process.kill()
    run.wait(20.0)
    assert set(scene.finals()) == {undisturbed[scene.until - 1]}
    scene.check_so_far(undisturbed)


def check_end(scene: Scene, run: LaunchedRun, undisturbed: Digests) -> None:
    """It ends well, with the same bits, and leaves nothing."""
    assert run.wait(60.0) == 0
    scene.check_nothing_left()
    assert set(scene.finals()) == {undisturbed[scene.until - 1]}
    scene.check_so_far(undisturbed)


def test_the_only_replica_is_lost_with_its_node_and_goes_on_from_the_neighbour(
    tmp_path: Path, undisturbed: Digests
) -> None:
    # Nodes 0 and 1 fail together, so that the copy is on node 2; the coordinator is lost, too.
    scene = Scene(
        tmp_path,
        (gate(step=12),),
        replicas=1,
        options=("--nodes", "3", "--domains", "a,a,b"),
        faults=NO_DISK,
    )
    nodes = Nodes(scene.folder)
    with scene.launched() as run:
        await_gate(scene, 0)
        nodes.await_copy(2, 0, SAVED)
        assert nodes.held(1) == ()
        nodes.lose(0)
        assert nodes.on_disk() == []
        check_bits(scene, run, undisturbed)
    assert restored(scene) == [(0, "init"), (SAVED, "vault")]
    # Its own vault had nothing: it took the state from another node.
    assert [one.node for one in scene.events() if isinstance(one, WorkerReplaced)] == [1]


def test_states_are_copied_while_one_replica_is_left_and_not_when_there_are_two(
    tmp_path: Path, undisturbed: Digests
) -> None:
    scene = Scene(
        tmp_path,
        (
            # Slot 1 dies, and its successor is kept from coming until step 10 is saved.
            Mishap(at="lane", what="kill", slot=1, step=6),
            gate("rehearse", slot=-1, after=0),
            gate(step=12),
            # Once it has a lane to compute, two hold the state.
            gate(slot=1, after=1),
            gate(slot=1, step=28),
        ),
        options=("--nodes", "2"),
        lane_s=0.03,
    )
    nodes = Nodes(scene.folder)
    with scene.launched() as run:
        await_gate(scene, 2)
        nodes.await_copy(1, 0, SAVED)
        open_gate(scene.out, 1)
        open_gate(scene.out, 2)
        await_gate(scene, 3)
        await_that(lambda: not nodes.neighbours(1), "node 1 is still to copy")
        open_gate(scene.out, 3)
        await_gate(scene, 4)
        run.await_record(lambda one: isinstance(one.event, SaveDurable) and one.event.step == 25, 20.0)
        await_that(lambda: 25 in [one.step for one in nodes.held(0)], "node 0 never held step 25")
        assert max(nodes.copies(1, 0)) < 25
        open_gate(scene.out, 4)
        check_end(scene, run, undisturbed)


@full
def test_one_of_two_replicas_is_lost_for_good_and_then_the_other(
    tmp_path: Path, undisturbed: Digests
) -> None:
    # Node 1 is lost and does not come back. What comes in its place on node 2 is kept from coming, so that
    # one replica is left; node 2 keeps the copies, for node 1 is not there. Then node 0 is lost as well.
    scene = Scene(
        tmp_path,
        (gate(step=6), gate("rehearse", slot=-1, after=0), gate(step=12)),
        options=("--nodes", "3"),
        faults=NO_DISK,
    )
    nodes = Nodes(scene.folder)
    with scene.launched() as run:
        await_gate(scene, 0)
        assert not any(map(nodes.neighbours, range(3)))
        with nodes.lost_for_good(1):
            await_gate(scene, 1)
            open_gate(scene.out, 0)
            await_gate(scene, 2)
            nodes.await_copy(2, 0, SAVED)
            nodes.lose(0)
            assert nodes.on_disk() == []
            open_gate(scene.out, 1)
            check_end(scene, run, undisturbed)
    assert restored(scene) == [(0, "init"), (SAVED, "vault")]


def test_what_is_staged_when_a_notice_comes_is_on_disk_before_the_node_is_gone(
    tmp_path: Path, undisturbed: Digests
) -> None:
    # The worker never comes to the end of its step: nothing newer than what the vault holds can be saved.
    # Step 5 is on disk, step 10 is on its way there when the notice comes.
    slow = "vault.part.synced:delay=3@2"
    scene = Scene(tmp_path, (gate(step=12),), replicas=1, options=("--grace-s", "1"), faults=slow)
    nodes = Nodes(scene.folder)
    with scene.launched() as run:
        await_gate(scene, 0)
        run.await_record(lambda one: isinstance(one.event, SaveDurable) and one.event.step == 5, 20.0)
        run.await_record(lambda one: isinstance(one.event, SaveStaged) and one.event.step == SAVED, 20.0)
        assert nodes.on_disk() == [5]
        os.kill(nodes.agent(0), signal.SIGTERM)
        assert run.wait(30.0) == 75
        scene.check_nothing_left()
    assert nodes.on_disk() == [5, SAVED]
    again = Scene(tmp_path, replicas=1)
    assert again.play() == 0
    again.check(undisturbed)
    assert restored(scene) == [(0, "init"), (SAVED, "disk")]
