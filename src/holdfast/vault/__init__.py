"""The process beside the trainer that owns staged state. Imports no ML framework.

`save()` copies into a slot of the vault's arena; from `staged` on the vault finishes the save by itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from holdfast.vault.arena import Slot
from holdfast.vault.client import VaultWriter
from holdfast.vault.commit import withdraw
from holdfast.vault.crew import Crew
from holdfast.vault.intents import intended
from holdfast.vault.messages import CoordinatorAt, Hello, Order, Outcome, Recipe, ServeAt
from holdfast.vault.recycling import AGREEMENT, WORK, keep_for_recycling
from holdfast.vault.server import make_agreement
from holdfast.vault.writer import ThreadWriter, Writer, outcome_error

if TYPE_CHECKING:
    from holdfast.vault.restores import restore

__all__ = [
    "AGREEMENT",
    "WORK",
    "CoordinatorAt",
    "Crew",
    "Hello",
    "Order",
    "Outcome",
    "Recipe",
    "ServeAt",
    "Slot",
    "ThreadWriter",
    "VaultWriter",
    "Writer",
    "intended",
    "keep_for_recycling",
    "make_agreement",
    "outcome_error",
    "restore",
    "withdraw",
]


def __getattr__(name: str) -> object:
    # A vault that serves no restores does without the transfer room.
    if name != "restore":
        raise AttributeError(f"module 'holdfast.vault' has no attribute {name!r}")
    value: object = getattr(importlib.import_module("holdfast.vault.restores"), name)
    globals()[name] = value
    return value
