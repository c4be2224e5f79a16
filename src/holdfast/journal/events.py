"""What can happen in a run: one frozen struct per kind of event.

An event says what happened, with numbers in bytes and seconds; when, where and in which process
is the record's part. Add fields with defaults and never change a field's meaning: journals are
read by older and newer versions.
"""

from __future__ import annotations

from typing import Any

import msgspec


class _Event(msgspec.Struct, frozen=True, tag_field="kind", tag=True):
    pass


class SaveStarted(_Event, frozen=True):
    """`save()` was called for `step`."""

    step: int


class SaveCaptured(_Event, frozen=True):
    """Later steps can no longer change the saved state; `blocked_s` is what the caller waited."""

    step: int
    bytes: int
    blocked_s: float


class SaveStaged(_Event, frozen=True):
    """All bytes lie in the vault; the save survives the trainer's death."""

    step: int
    bytes: int = 0
    seconds: float = 0.0


class SaveDurable(_Event, frozen=True):
    """The step is committed to storage, `seconds` after `save()` was called."""

    step: int
    bytes: int
    seconds: float


class SaveFailed(_Event, frozen=True):
    """The save of `step` failed; earlier steps stay loadable."""

    step: int
    reason: str


class SaveSkipped(_Event, frozen=True):
    """No save of `step` was started, for example because one was still under way."""

    step: int
    reason: str


class LoadStarted(_Event, frozen=True):
    """A load of `step` began; None asks for the newest good one."""

    step: int | None = None


class LoadFinished(_Event, frozen=True):
    """`step` was loaded and verified."""

    step: int
    bytes: int
    seconds: float


class BlockBad(_Event, frozen=True):
    """Block number `block` of `file` failed its checksum; `arrays` names what lies there."""

    file: str
    block: int
    arrays: tuple[str, ...]
    reason: str


class StepSkipped(_Event, frozen=True):
    """A load passed over `step` in favour of an earlier one."""

    step: int
    reason: str


class VaultStarted(_Event, frozen=True):
    """A vault process is ready."""

    pid: int


class VaultDied(_Event, frozen=True):
    """A vault process is gone without having been asked to leave."""

    pid: int
    reason: str


class VaultReplaced(_Event, frozen=True):
    """A new vault took over from a dead one."""

    old_pid: int
    pid: int


class StepPruned(_Event, frozen=True):
    """Retention removed `step`."""

    step: int


class Cleaned(_Event, frozen=True):
    """Something a crash had left behind was removed."""

    path: str
    reason: str


class CoordinatorStarted(_Event, frozen=True):
    """A coordinator serves at `addresses`; it took `seconds` to bring `records` records back."""

    pid: int
    term: int
    addresses: tuple[str, ...]
    records: int
    seconds: float


class CoordinatorStopped(_Event, frozen=True):
    """A coordinator stopped on purpose, or because it could not go on; a kill leaves no such event."""

    pid: int
    reason: str


class GenerationFormed(_Event, frozen=True):
    """The members of the next generation are agreed on."""

    generation: int
    members: int


class MemberSuspected(_Event, frozen=True):
    """Nothing was heard from the member in `slot` for a while."""

    slot: int
    reason: str


class MemberLost(_Event, frozen=True):
    """The member in `slot` died, left or was replaced."""

    slot: int
    incarnation: str
    reason: str


class MemberRejoined(_Event, frozen=True):
    """A restarted member took `slot` back in the running generation."""

    slot: int
    reason: str


class BarrierLate(_Event, frozen=True):
    """A barrier, vote or other meeting still waits; `reason` says for whom."""

    name: str
    reason: str


class BarrierFailed(_Event, frozen=True):
    """An epoch of a barrier, vote or other meeting failed for all its participants."""

    name: str
    epoch: int
    reason: str


class TroubleReported(_Event, frozen=True):
    """A member told all others of an error."""

    reason: str


class StopAsked(_Event, frozen=True):
    """Somebody asked the run to stop."""

    reason: str


class StopAgreed(_Event, frozen=True):
    """All members stop at `step`."""

    step: int
    reason: str


class Dropped(_Event, frozen=True):
    """The journal of this process lost `count` events, for want of room or disk."""

    count: int


Event = (
    SaveStarted
    | SaveCaptured
    | SaveStaged
    | SaveDurable
    | SaveFailed
    | SaveSkipped
    | LoadStarted
    | LoadFinished
    | BlockBad
    | StepSkipped
    | VaultStarted
    | VaultDied
    | VaultReplaced
    | StepPruned
    | Cleaned
    | CoordinatorStarted
    | CoordinatorStopped
    | GenerationFormed
    | MemberSuspected
    | MemberLost
    | MemberRejoined
    | BarrierLate
    | BarrierFailed
    | TroubleReported
    | StopAsked
    | StopAgreed
    | Dropped
)


class Unknown(msgspec.Struct, frozen=True):
    """An event this version cannot type: a newer kind, or a known kind with other fields."""

    kind: str
    data: dict[str, Any]
