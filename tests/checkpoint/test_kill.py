"""SIGKILL at every named fault site of trainer and vault: a staged save is safe, a committed one stays."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from _pytest.mark import ParameterSet

from holdfast import faults, journal
from holdfast.checkpoint import Checkpointer
from holdfast.journal import SaveDurable, VaultDied, VaultReplaced
from tests.checkpoint.children import Child, Children, await_end, await_state, memfds
from tests.checkpoint.folder import check_clean, check_loads, check_next_start, events

pytestmark = pytest.mark.process

# Where in the second save a site is met: its hit number, and the step that must be loadable afterwards.
TRAINER = {
    "trainer.save.begin": (2, 1),
    "trainer.stage.block": (4, 1),
    "trainer.stage.done": (2, 2),
    "trainer.durable.seen": (2, 2),
    "trainer.prune.manifest": (1, 2),
    "trainer.prune.parts": (1, 2),
}
VAULT = {
    "vault.begin": (2, 1),
    "vault.reserved": (2, 1),
    "vault.block.written": (4, 1),
    "vault.part.synced": (2, 1),
    "vault.index.written": (2, 1),
    "vault.voted": (2, 1),
    "vault.decided": (2, 1),
    "vault.manifest.created": (2, 2),
    "vault.step.synced": (2, 2),
}


def every_day(table: Iterable[str], *sites: str) -> list[ParameterSet]:
    """All sites of a table; but for these they are for the long run, being met in the same way."""
    return [pytest.param(one, marks=() if one in sites else (pytest.mark.full,)) for one in table]


def trainer(children: Children, root: Path, *options: object, **env: str) -> Child:
    return children.python("-m", "tests.checkpoint.trainer", root, *options, **env)


def test_every_site_is_killed_here() -> None:
    # The others are met in tests/transfer, tests/reduce, tests/recovery, tests/train/data, tests/vault,
    # tests/checkpoint/foreign and tests/jax.
    rooms = ("transfer.", "reduce.", "run.", "data.", "mirror.", "import.", "export.")
    elsewhere = (*rooms, "trainer.stage.device")
    ours = {site for site in faults.SITES if not site.startswith(elsewhere)}
    assert {*TRAINER, *VAULT} == ours


@pytest.mark.parametrize("site", every_day(TRAINER, "trainer.stage.block", "trainer.stage.done"))
def test_trainer_killed(site: str, children: Children, root: Path) -> None:
    nth, loadable = TRAINER[site]
    # Pruning runs beside the trainer, which must not have begun a third save by then.
    pruning = ["--keep", 1, "--steps", 2, "--then", "wait"] if "prune" in site else []
    child = trainer(children, root, *pruning, **{faults.ENV: f"{site}:kill@{nth}"})
    vault = child.until("ready")["vault"]
    seen = child.rest()
    assert child.end() == -signal.SIGKILL
    # Nobody tells the vault to end; a staged save is finished first.
    await_end(vault)
    assert children.alive() == []
    assert max(line["step"] for line in seen if line["saw"] == "durable") <= loadable
    check_loads(root, loadable)
    if loadable == 2:
        assert 2 in [event.step for event in events(root, SaveDurable)]
    check_next_start(root, 10)


@pytest.mark.parametrize(
    "site", every_day(VAULT, "vault.begin", "vault.block.written", "vault.voted", "vault.manifest.created")
)
def test_vault_killed(site: str, children: Children, root: Path) -> None:
    nth, _ = VAULT[site]
    child = trainer(children, root, "--arm-vaults", 1, **{faults.ENV: f"{site}:kill@{nth}"})
    first = child.until("ready")["vault"]
    seen = child.rest()
    assert child.end() == 0, child.errors()
    await_end(first)
    children.await_all_ended()
    # The trainer went on, and the save that wore the vault out became durable like the others.
    assert [line["step"] for line in seen if line["saw"] == "durable"] == [1, 2, 3]
    (died,) = events(root, VaultDied)
    (replaced,) = events(root, VaultReplaced)
    assert died.pid == replaced.old_pid == first
    assert died.reason == "signal 9"
    with Checkpointer(root, journal=False) as ckpt:
        assert [ckpt.verify(step) for step in ckpt] == [[], [], []]
    check_loads(root, 3)
    check_clean(root)
    check_next_start(root, 10)


@pytest.mark.parametrize(
    "site", every_day(VAULT, "vault.block.written", "vault.decided", "vault.manifest.created")
)
def test_both_killed(site: str, children: Children, root: Path) -> None:
    nth, loadable = VAULT[site]
    child = trainer(children, root, "--arm-vaults", 1, **{faults.ENV: f"{site}:stop@{nth}"})
    vault = child.until("ready")["vault"]
    child.until("durable", step=1)
    await_state(vault, "T")
    child.kill()
    child.end()
    os.kill(vault, signal.SIGKILL)
    await_end(vault)
    assert children.alive() == []
    check_loads(root, loadable)
    # What the crash of both left on disk is cleaned by the next start.
    check_next_start(root, 10)
    check_loads_before(root, loadable)


def check_loads_before(root: Path, step: int) -> None:
    with Checkpointer(root, journal=False) as ckpt:
        assert ckpt.steps() == [*range(1, step + 1), 10]
        assert ckpt.verify(step) == []


def test_vault_death_is_noticed_within_a_second(children: Children, root: Path) -> None:
    child = trainer(children, root, "--steps", 1, "--then", "wait")
    vault = child.until("ready")["vault"]
    child.until("waiting")
    following = journal.follow(root / "journal.jsonl", timeout_s=60.0)
    took_s: list[float] = []
    # The machine itself may pause for a second, and is not asked; a trainer that is late is so every time.
    while len(took_s) < 3 and min(took_s, default=1.0) >= 1.0:
        killed = time.time()
        os.kill(vault, signal.SIGKILL)
        died = next(record for record in following if isinstance(record.event, VaultDied))
        took_s.append(died.t - killed)
        vault = next(one.event.pid for one in following if isinstance(one.event, VaultReplaced))
    assert min(took_s) < 1.0, took_s
    child.tell()
    child.until("closed")
    assert child.end() == 0
    children.await_all_ended()


@pytest.mark.parametrize(
    "site", every_day(("vault.begin", "vault.block.written", "vault.voted"), "vault.block.written")
)
def test_three_deaths_fail_the_save_and_not_the_next(site: str, children: Children, root: Path) -> None:
    child = children.python("-c", THREE_DEATHS, root, **{faults.ENV: f"{site}:kill"})
    failed = child.until("failed", step=1)
    assert failed["error"] == "VaultDiedError"
    assert "step 1" in failed["message"]
    assert failed["seconds"] < 20.0
    seen = child.rest()
    assert child.end() == 0, child.errors()
    assert {line["step"]: line["saw"] for line in seen} == {2: "durable", 3: "durable"}
    assert len(events(root, VaultDied)) >= 3
    children.await_all_ended()
    check_next_start(root, 10)


THREE_DEATHS = """
import os, sys, time
from holdfast import faults
from holdfast.checkpoint import Checkpointer
from holdfast.errors import HoldfastError
from tests.checkpoint.trainer import report, state
with Checkpointer(sys.argv[1], deadline_s=20.0) as ckpt:
    for step in (1, 2, 3):
        started = time.monotonic()
        handle = ckpt.save(step, state(step))
        try:
            handle.durable(30.0)
            report("durable", step=step)
        except HoldfastError as error:
            spent = time.monotonic() - started
            report("failed", step=step, error=type(error).__name__, message=error.message, seconds=spent)
        os.environ.pop(faults.ENV, None)
"""


def test_two_saves_under_way_survive_the_vault(children: Children, root: Path) -> None:
    """Both the save that is being written and the one behind it are handed to the next vault."""
    spec = "vault.block.written:delay=0.3@1+;vault.part.synced:kill"
    child = trainer(children, root, "--slots", 2, "--loose", "--arm-vaults", 1, **{faults.ENV: spec})
    child.until("ready")
    assert child.end() == 0, child.errors()
    children.await_all_ended()
    with Checkpointer(root, journal=False) as ckpt:
        assert ckpt.steps() == [1, 2, 3]
    check_loads(root, 3)
    check_clean(root)


def test_trainer_holds_no_slots_after_closing(children: Children, root: Path) -> None:
    held = memfds()
    with Checkpointer(root) as ckpt:
        ckpt.save(1, {"x": np.zeros(1 << 20)})
        assert len(memfds()) > len(held)
        vault = ckpt.vault_pid
        assert vault is not None
    await_end(vault)
    assert memfds() == held
    assert children.alive() == []
