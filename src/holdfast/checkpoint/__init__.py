"""Save, load, verify and keep checkpoints.

A save is captured (later steps cannot change it), staged (it survives the trainer), durable (committed). A
load takes the newest step that verifies, on any mesh. Failures of a save never stop training.
"""

from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.handle import SaveHandle, SaveState
from holdfast.checkpoint.loading import LoadReport
from holdfast.checkpoint.retention import Policy, best, every, everything, latest, within
from holdfast.checkpoint.steps import StepInfo

__all__ = [
    "Checkpointer",
    "LoadReport",
    "Policy",
    "SaveHandle",
    "SaveState",
    "StepInfo",
    "best",
    "every",
    "everything",
    "latest",
    "within",
]
