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


class StagingRoute(_Event, frozen=True):
    """From now on state leaves its devices by `route`; `reason` says why by no better one."""

    route: str
    reason: str = ""


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
    """Retention removed `step`; `place` says where, if not in the folder of the run."""

    step: int
    place: str = ""


class StepMirrored(_Event, frozen=True):
    """`step` is whole on the mirror at `place`; rank 0 had to send `sent` bytes for that."""

    step: int
    place: str
    bytes: int
    sent: int
    seconds: float


class MirrorFailed(_Event, frozen=True):
    """Copying to a mirror failed for now, and is tried again after `retry_s`."""

    step: int | None
    place: str
    reason: str
    retry_s: float


class MirrorLeft(_Event, frozen=True):
    """`step` is not on the mirror at `place`, and this vault will not copy it."""

    step: int
    place: str
    reason: str


class MirrorDraining(_Event, frozen=True):
    """A run is over and its vault still copies `steps` to a mirror, for `timeout_s` at most."""

    place: str
    steps: tuple[int, ...]
    timeout_s: float


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


class RunStarted(_Event, frozen=True):
    """A run began, or goes on after a launch that ended: so many replicas of so many workers."""

    replicas: int
    workers_per_replica: int
    nodes: int


class WorkerLost(_Event, frozen=True):
    """A worker that held a seat ended before its work was done. `code` is an exit code, or minus a signal."""

    worker: int
    replica: int
    index: int
    node: int
    cause: str
    code: int
    step: int
    phase: str
    reason: str = ""


class WorkerReplaced(_Event, frozen=True):
    """A seat was given to another process; `remedy` says where that came from."""

    worker: int
    replica: int
    index: int
    node: int
    attempt: int
    remedy: str


class RunShrunk(_Event, frozen=True):
    """The run goes on with fewer replicas."""

    replicas: int
    wanted: int
    reason: str


class RunGrown(_Event, frozen=True):
    """There are more replicas again."""

    replicas: int
    wanted: int
    reason: str


class NodeLeaving(_Event, frozen=True):
    """A node goes away in `notice_s` seconds; its workers leave the run first."""

    node: int
    notice_s: float
    reason: str


class AgentLost(_Event, frozen=True):
    """The agent of a node is gone, and all its workers with it."""

    node: int
    reason: str


class NodeBlamed(_Event, frozen=True):
    """So many workers failed on one node that it is used only where there is no other."""

    node: int
    blames: int
    reason: str


class StepPoisoned(_Event, frozen=True):
    """Workers fail at this step again and again."""

    step: int
    failures: int
    reason: str


class BudgetSpent(_Event, frozen=True):
    """`culprit` failed more often for one cause than is allowed without progress."""

    cause: str
    failures: int
    window_s: float
    culprit: str


class RunEnded(_Event, frozen=True):
    """The run is over, with this exit code."""

    code: int
    reason: str


class WorkerSpawned(_Event, frozen=True):
    """An agent started a process: a worker, or one that parks itself."""

    node: int
    worker: int
    pid: int


class WorkerExited(_Event, frozen=True):
    """An agent saw a process of its node end; `reason` says how."""

    node: int
    worker: int
    pid: int
    cause: str
    code: int
    step: int
    phase: str
    reason: str


class WorkerHung(_Event, frozen=True):
    """A worker makes no progress, for `seconds` when it was noticed; it will be killed."""

    node: int
    worker: int
    pid: int
    slot: int
    cause: str
    phase: str
    step: int
    seconds: float
    reason: str


class WorkerFenced(_Event, frozen=True):
    """A worker that the coordinator declared dead went on for `seconds`; it will be killed."""

    node: int
    worker: int
    pid: int
    slot: int
    phase: str
    step: int
    seconds: float


class StacksDumped(_Event, frozen=True):
    """Where a hung worker was is written down in `path`."""

    node: int
    worker: int
    path: str


class PartStarted(_Event, frozen=True):
    """An agent started a coordinator, vault or other part of its node, or adopted one that was there."""

    node: int
    part: str
    pid: int
    adopted: bool = False


class PartRestarted(_Event, frozen=True):
    """A part of a node died, for `reason`, and was started again."""

    node: int
    part: str
    pid: int
    reason: str


class StepDone(_Event, frozen=True):
    """A step is over, `seconds` after the one before it, with so many replicas and lanes."""

    step: int
    seconds: float
    replicas: int
    lanes: int


class LaneDigests(_Event, frozen=True):
    """What the worker in `slot` added for each of its lanes, as digests."""

    step: int
    slot: int
    lanes: tuple[int, ...]
    digests: tuple[str, ...]


class StateReceived(_Event, frozen=True):
    """A newcomer got the state of `step` from the worker in slot `source`."""

    step: int
    bytes: int
    seconds: float
    source: int


class RunRestored(_Event, frozen=True):
    """A run goes on from `step`; `source` is where its state came from: vault, disk, mirror or init."""

    step: int
    source: str
    seconds: float = 0.0


class Regrouped(_Event, frozen=True):
    """A worker goes on at `step` with other members, `seconds` after it had to stop for that."""

    generation: int
    step: int
    members: tuple[int, ...]
    lost: tuple[int, ...]
    seconds: float


class Dropped(_Event, frozen=True):
    """The journal of this process lost `count` events, for want of room or disk."""

    count: int


Event = (
    SaveStarted
    | SaveCaptured
    | SaveStaged
    | StagingRoute
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
    | StepMirrored
    | MirrorFailed
    | MirrorLeft
    | MirrorDraining
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
    | RunStarted
    | WorkerLost
    | WorkerReplaced
    | RunShrunk
    | RunGrown
    | NodeLeaving
    | AgentLost
    | NodeBlamed
    | StepPoisoned
    | BudgetSpent
    | RunEnded
    | WorkerSpawned
    | WorkerExited
    | WorkerHung
    | WorkerFenced
    | StacksDumped
    | PartStarted
    | PartRestarted
    | StepDone
    | LaneDigests
    | StateReceived
    | RunRestored
    | Regrouped
    | Dropped
)


class Unknown(msgspec.Struct, frozen=True):
    """An event this version cannot type: a newer kind, or a known kind with other fields."""

    kind: str
    data: dict[str, Any]
