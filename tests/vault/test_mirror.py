"""A vault that copies to a mirror: killed at every point of that, slow, alone, and more than one of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from holdfast import faults
from holdfast.checkpoint import Checkpointer
from holdfast.journal import MirrorDraining, MirrorLeft, StepMirrored, VaultDied
from tests.checkpoint.children import Child, Children, await_end, await_state, within
from tests.checkpoint.folder import check_clean, check_loads, events
from tests.vault.test_vault import standing

pytestmark = pytest.mark.process

# Where in the copy of the second step a site is met, and whether its one part is whole there by then.
SITES = {
    "mirror.block": (4, False),
    "mirror.part": (2, False),
    "mirror.complete": (2, True),
    "mirror.manifest": (2, True),
}
BOTH = [pytest.param(site, marks=() if site == "mirror.block" else pytest.mark.full) for site in SITES]
ONE = [pytest.param(site, marks=() if site == "mirror.complete" else pytest.mark.full) for site in SITES]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "mirror"


def trainer(children: Children, root: Path, place: Path, *options: object, **env: str) -> Child:
    return children.python("-m", "tests.vault.mirroring", root, place, *options, **env)


def check_same(root: Path, place: Path, *steps: int) -> None:
    """Fail unless the mirror has exactly these steps, byte for byte, and they load."""
    with Checkpointer(place, journal=False) as ckpt:
        assert ckpt.steps() == list(steps)
    for step in steps:
        name = f"step-{step:08d}"
        for path in (root / name).iterdir():
            assert (place / name / path.name).read_bytes() == path.read_bytes()
    check_clean(place)
    check_loads(place, steps[-1])


def test_every_site_is_killed_here() -> None:
    assert set(SITES) == {site for site in faults.SITES if site.startswith("mirror.")}


@pytest.mark.parametrize("site", ONE)
def test_a_killed_vault_is_followed_by_one_that_finishes(
    site: str, children: Children, root: Path, place: Path
) -> None:
    nth, whole = SITES[site]
    child = trainer(children, root, place, "--arm-vaults", 1, **{faults.ENV: f"{site}:kill@{nth}"})
    first = child.until("ready")["vault"]
    seen = child.rest()
    assert child.end() == 0, child.errors()
    await_end(first)
    children.await_all_ended()
    # The handle heard of it from the vault that took over.
    assert [line["step"] for line in seen if line["saw"] == "mirrored"] == [1, 2]
    assert len(events(root, VaultDied)) == 1
    check_same(root, place, 1, 2)
    sent = {event.step: event.sent for event in events(root, StepMirrored)}
    assert set(sent) == {1, 2}
    # What was whole by then is not sent again.
    assert (sent[2] == 0) == whole


@pytest.mark.parametrize("site", BOTH)
def test_both_are_killed_and_the_next_run_finishes(
    site: str, children: Children, root: Path, place: Path
) -> None:
    nth, whole = SITES[site]
    child = trainer(children, root, place, **{faults.ENV: f"{site}:stop@{nth}"})
    vault = child.until("ready")["vault"]
    child.until("durable", step=2)
    await_state(vault, "T")
    child.kill()
    child.end()
    os.kill(vault, signal.SIGKILL)
    await_end(vault)
    if site != "mirror.manifest":
        with Checkpointer(place, journal=False) as ckpt:
            assert ckpt.steps() == [1]  # half a step is none
    again = trainer(children, root, place, "--first", 3, "--steps", 1)
    assert again.end() == 0, again.errors()
    children.await_all_ended()
    check_same(root, place, 1, 2, 3)
    sent = {event.step: event.sent for event in events(root, StepMirrored)}
    assert (sent[2] == 0) == whole


@pytest.mark.full
def test_a_dead_trainers_vault_copies_to_the_end(children: Children, root: Path, place: Path) -> None:
    slow = {faults.ENV: "mirror.block:delay=1@1+"}
    child = trainer(children, root, place, "--wait", "durable", "--then", "wait", **slow)
    vault = child.until("ready")["vault"]
    child.until("waiting")
    child.kill()
    child.end()
    await_end(vault)
    children.await_all_ended()
    check_same(root, place, 1, 2)
    (draining,) = events(root, MirrorDraining)
    assert draining.steps[-1] == 2


@pytest.mark.full
def test_a_stuck_mirror_delays_no_save_and_bounds_the_end(
    children: Children, root: Path, place: Path
) -> None:
    stuck = {faults.ENV: "mirror.block:delay=30@1+"}
    child = trainer(children, root, place, "--wait", "durable", "--steps", 4, "--drain", 0.5, **stuck)
    with within(25.0):
        assert [child.until("durable")["step"] for _ in range(4)] == [1, 2, 3, 4]
        child.until("closed")
        assert child.end() == 0, child.errors()
    assert {event.step for event in events(root, MirrorLeft)} == {1, 2, 3, 4}
    children.await_all_ended()


@pytest.mark.full
def test_two_trainers_of_a_standing_vault_share_the_copying(
    children: Children, root: Path, place: Path, tmp_path: Path
) -> None:
    """The session of the first is still copying when the second one's begins: one of them at a time does."""
    slow = {faults.ENV: "mirror.block:delay=0.3@1+"}
    vault, path = standing(children, tmp_path, **slow)
    child = trainer(children, root, place, "--writer", path, "--wait", "durable", "--then", "wait")
    child.until("waiting")
    child.kill()
    child.end()
    again = trainer(children, root, place, "--writer", path, "--first", 3, "--steps", 1)
    again.until("mirrored", step=3)
    again.until("closed")
    assert again.end() == 0, again.errors()
    vault.kill(signal.SIGTERM)
    assert vault.end() == 0, vault.errors()
    check_same(root, place, 1, 2, 3)
    steps = [event.step for event in events(root, StepMirrored)]
    assert sorted(steps) == [1, 2, 3]
