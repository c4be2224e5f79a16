"""The process beside the trainer that owns staged state. Imports no ML framework.

`save()` copies into a slot of the vault's arena; from `staged` on the vault finishes the save by itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from holdfast.vault.agreements import make_agreement
from holdfast.vault.arena import Slot
from holdfast.vault.attachment import copy_from
from holdfast.vault.client import VaultWriter
from holdfast.vault.commit import withdraw
from holdfast.vault.crew import Crew
from holdfast.vault.intents import (
    Accepted,
    Intent,
    accepted,
    announce,
    claim,
    revoke,
    sweep_fences,
    unfence,
)
from holdfast.vault.messages import CoordinatorAt, Hello, MirrorTo, Order, Outcome, Recipe, ServeAt
from holdfast.vault.mirror_plan import wanted
from holdfast.vault.mirror_records import Records, mirrors_of
from holdfast.vault.placement import neighbours
from holdfast.vault.recycling import AGREEMENT, WORK, keep_for_recycling
from holdfast.vault.remains import announced_attempts, attempt_in, dead_attempts, locked_attempts
from holdfast.vault.writer import Copy, ThreadWriter, Writer, outcome_error

if TYPE_CHECKING:
    from holdfast.vault.restores import restore, restore_newest

__all__ = [
    "AGREEMENT",
    "WORK",
    "Accepted",
    "CoordinatorAt",
    "Copy",
    "Crew",
    "Hello",
    "Intent",
    "MirrorTo",
    "Order",
    "Outcome",
    "Recipe",
    "Records",
    "ServeAt",
    "Slot",
    "ThreadWriter",
    "VaultWriter",
    "Writer",
    "accepted",
    "announce",
    "announced_attempts",
    "attempt_in",
    "claim",
    "copy_from",
    "dead_attempts",
    "keep_for_recycling",
    "locked_attempts",
    "make_agreement",
    "mirrors_of",
    "neighbours",
    "outcome_error",
    "restore",
    "restore_newest",
    "revoke",
    "sweep_fences",
    "unfence",
    "wanted",
    "withdraw",
]


def __getattr__(name: str) -> object:
    # A vault that serves no restores does without the transfer room.
    if name not in ("restore", "restore_newest"):
        raise AttributeError(f"module 'holdfast.vault' has no attribute {name!r}")
    value: object = getattr(importlib.import_module("holdfast.vault.restores"), name)
    globals()[name] = value
    return value
