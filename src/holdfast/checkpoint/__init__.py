"""Save, load, verify and keep checkpoints.

A save is captured (later steps cannot change it), staged (it survives the trainer), durable (committed). A
load takes the newest step that verifies, on any mesh. Failures of a save never stop training.
"""

from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.handle import SaveHandle, SaveState
from holdfast.checkpoint.hub import NameMap, Rule, export_hub, load_hub, save_hub
from holdfast.checkpoint.lease import Lease
from holdfast.checkpoint.loading import LoadReport
from holdfast.checkpoint.retention import Policy, best, doomed, every, everything, latest, within
from holdfast.checkpoint.step_reader import StepReader
from holdfast.checkpoint.steps import (
    StepInfo,
    committed_steps,
    each,
    readable_steps,
    step_info,
    step_manifest,
)
from holdfast.checkpoint.tiers import Mirror, Whereabouts, whereabouts
from holdfast.checkpoint.upkeep import in_flight, leftovers, remove_step

__all__ = [
    "Checkpointer",
    "Lease",
    "LoadReport",
    "Mirror",
    "NameMap",
    "Policy",
    "Rule",
    "SaveHandle",
    "SaveState",
    "StepInfo",
    "StepReader",
    "Whereabouts",
    "best",
    "committed_steps",
    "doomed",
    "each",
    "every",
    "everything",
    "export_hub",
    "in_flight",
    "latest",
    "leftovers",
    "load_hub",
    "readable_steps",
    "remove_step",
    "save_hub",
    "step_info",
    "step_manifest",
    "whereabouts",
    "within",
]
