"""Checkpoints of other libraries: brought in from Orbax and torch, and written for Orbax.

Nothing here imports either library or runs code from a file: zarr is read through tensorstore, torch's
pickles by an interpreter that knows what a checkpoint consists of and refuses the rest by name.
"""

from holdfast.checkpoint.foreign.export import export_orbax
from holdfast.checkpoint.foreign.moving import LEAST_MEMORY, MEMORY, import_checkpoint
from holdfast.checkpoint.foreign.renaming import parsed_rules
from holdfast.checkpoint.foreign.report import MovedArray, MoveReport, Renamed
from holdfast.checkpoint.foreign.source import Skipped

__all__ = [
    "LEAST_MEMORY",
    "MEMORY",
    "MoveReport",
    "MovedArray",
    "Renamed",
    "Skipped",
    "export_orbax",
    "import_checkpoint",
    "parsed_rules",
]
