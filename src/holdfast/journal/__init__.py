"""Typed events of a run, appended crash-safe by any process of it and followed live.

journal = Journal(path, component="trainer")
journal.append(SaveStarted(step=100))       # microseconds; never fails, never blocks

for record in read(path):
    print(record.t, record.component, record.event)
"""

from holdfast.journal.events import (
    BlockBad,
    Cleaned,
    Dropped,
    Event,
    LoadFinished,
    LoadStarted,
    SaveCaptured,
    SaveDurable,
    SaveFailed,
    SaveSkipped,
    SaveStaged,
    SaveStarted,
    StepPruned,
    StepSkipped,
    Unknown,
    VaultDied,
    VaultReplaced,
    VaultStarted,
)
from holdfast.journal.reader import Reading, follow, read
from holdfast.journal.record import Record
from holdfast.journal.writer import Journal

__all__ = [
    "BlockBad",
    "Cleaned",
    "Dropped",
    "Event",
    "Journal",
    "LoadFinished",
    "LoadStarted",
    "Reading",
    "Record",
    "SaveCaptured",
    "SaveDurable",
    "SaveFailed",
    "SaveSkipped",
    "SaveStaged",
    "SaveStarted",
    "StepPruned",
    "StepSkipped",
    "Unknown",
    "VaultDied",
    "VaultReplaced",
    "VaultStarted",
    "follow",
    "read",
]
