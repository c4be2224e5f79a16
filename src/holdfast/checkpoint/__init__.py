"""Save, load, verify and keep checkpoints.

A save is captured (later steps cannot change it), staged (it survives the trainer), durable (committed). A
load takes the newest step that verifies, on any mesh. Failures of a save never stop training.
"""

from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.handle import SaveHandle, SaveState
from holdfast.checkpoint.lease import Lease
from holdfast.checkpoint.loading import LoadReport
from holdfast.checkpoint.retention import Policy, best, doomed, every, everything, latest, within
from holdfast.checkpoint.steps import StepInfo, committed_steps, readable_steps, step_info, step_manifest
from holdfast.checkpoint.upkeep import in_flight, leftovers, remove_step

__all__ = [
    "Checkpointer",
    "Lease",
    "LoadReport",
    "Policy",
    "SaveHandle",
    "SaveState",
    "StepInfo",
    "best",
    "committed_steps",
    "doomed",
    "every",
    "everything",
    "in_flight",
    "latest",
    "leftovers",
    "readable_steps",
    "remove_step",
    "step_info",
    "step_manifest",
    "within",
]
