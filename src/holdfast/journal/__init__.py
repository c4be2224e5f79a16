"""Typed events of a run, appended crash-safe by any process of it and followed live.

journal = Journal(path, component="trainer")
journal.append(SaveStarted(step=100))       # microseconds; never fails, never blocks

for record in read(path):
    print(record.t, record.component, record.event)
"""

from holdfast.journal.events import (
    BarrierFailed,
    BarrierLate,
    BlockBad,
    Cleaned,
    CoordinatorStarted,
    CoordinatorStopped,
    Dropped,
    Event,
    GenerationFormed,
    LoadFinished,
    LoadStarted,
    MemberLost,
    MemberRejoined,
    MemberSuspected,
    SaveCaptured,
    SaveDurable,
    SaveFailed,
    SaveSkipped,
    SaveStaged,
    SaveStarted,
    StepPruned,
    StepSkipped,
    StopAgreed,
    StopAsked,
    TroubleReported,
    Unknown,
    VaultDied,
    VaultReplaced,
    VaultStarted,
)
from holdfast.journal.reader import Reading, follow, read
from holdfast.journal.record import Record
from holdfast.journal.writer import Journal

__all__ = [
    "BarrierFailed",
    "BarrierLate",
    "BlockBad",
    "Cleaned",
    "CoordinatorStarted",
    "CoordinatorStopped",
    "Dropped",
    "Event",
    "GenerationFormed",
    "Journal",
    "LoadFinished",
    "LoadStarted",
    "MemberLost",
    "MemberRejoined",
    "MemberSuspected",
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
    "StopAgreed",
    "StopAsked",
    "TroubleReported",
    "Unknown",
    "VaultDied",
    "VaultReplaced",
    "VaultStarted",
    "follow",
    "read",
]
