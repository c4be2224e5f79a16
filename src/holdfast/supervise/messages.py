"""What conductor, agents and workers say to each other.

    conductor ── agent      the launch process decides; one agent per node is its hands and eyes
    agent ── worker         over a socket pair that the worker inherits

A *worker* here is a number that the conductor gives to one process for its whole life; a *seat* is a place in
the run that a worker can hold. Messages are msgpack arrays in frames (`holdfast.wire`).
"""

from __future__ import annotations

from typing import Final, TypeAlias

from msgspec import Struct

CRASHED: Final = "crashed"
"""Causes of an end: ended by an exit code other than 0 or by a signal."""
HUNG: Final = "hung"
"""No progress within its phase's deadline; killed."""
STOPPED: Final = "stopped"
"""A stopped process (SIGSTOP); killed."""
STALLED: Final = "stalled"
"""Used no CPU and waited in no named call; killed."""
FENCED: Final = "fenced"
"""Declared dead by the coordinator, and went on; killed."""
OUT_OF_MEMORY: Final = "out of memory"
PREEMPTED: Final = "preempted"
KILLED: Final = "killed"
"""Killed on the conductor's order; no failure of its own."""
AGENT_LOST: Final = "agent lost"
DONE: Final = "done"


class Seat(Struct, frozen=True, array_like=True, gc=False):
    """A place in the run. `attempt` counts the lives of this replica: a JAX world belongs to one attempt."""

    replica: int
    index: int
    attempt: int


# ---- agent to conductor


class AgentUp(Struct, frozen=True, array_like=True, tag=1, gc=False):
    """The agent of `node` is there. `parts` are the processes of a former agent that it adopted."""

    node: int
    pid: int
    parts: tuple[str, ...] = ()


class AgentBeat(Struct, frozen=True, array_like=True, tag=2, gc=False):
    """A sign of life, twice a second."""

    node: int


class WorkerStarted(Struct, frozen=True, array_like=True, tag=3, gc=False):
    """The process runs."""

    node: int
    worker: int
    pid: int


class WorkerParked(Struct, frozen=True, array_like=True, tag=4, gc=False):
    """It has imported and rehearsed, and waits for a seat."""

    node: int
    worker: int


class WorkerActive(Struct, frozen=True, array_like=True, tag=5, gc=False):
    """It is a member of the run, with `incarnation`, in `generation`."""

    node: int
    worker: int
    incarnation: str
    slot: int
    generation: int


class WorkerProgress(Struct, frozen=True, array_like=True, tag=6, gc=False):
    """Where it is; sent when that changed, at most twice a second."""

    node: int
    worker: int
    step: int
    phase: str
    median_step_s: float


class WorkerEnded(Struct, frozen=True, array_like=True, tag=7, gc=False):
    """The process is gone, `cause` says why. `code` is an exit code, or minus a signal."""

    node: int
    worker: int
    cause: str
    code: int
    step: int
    phase: str
    detail: str = ""
    """For people: its error, or where its stacks are."""


class WorkerDrained(Struct, frozen=True, array_like=True, tag=8, gc=False):
    """It has left the run at a step boundary, as it was asked to."""

    node: int
    worker: int


class PartLost(Struct, frozen=True, array_like=True, tag=9, gc=False):
    """The vault, the coordinator or another part died; the agent has started it again."""

    node: int
    part: str
    reason: str


class NodePreempted(Struct, frozen=True, array_like=True, tag=10, gc=False):
    """The node goes away in `notice_s` seconds."""

    node: int
    notice_s: float
    reason: str


Report: TypeAlias = (
    AgentUp
    | AgentBeat
    | WorkerStarted
    | WorkerParked
    | WorkerActive
    | WorkerProgress
    | WorkerEnded
    | WorkerDrained
    | PartLost
    | NodePreempted
)


# ---- conductor to agent


class Spawn(Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Start a process. It parks itself until it gets a seat, at once if `seat` is given."""

    worker: int
    seat: Seat | None = None


class Activate(Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Give a parked process a seat."""

    worker: int
    seat: Seat


class Kill(Struct, frozen=True, array_like=True, tag=3, gc=False):
    """End a process at once (SIGKILL)."""

    worker: int
    reason: str


class Drain(Struct, frozen=True, array_like=True, tag=4, gc=False):
    """Let a worker leave at its next step boundary."""

    worker: int
    reason: str


class Shutdown(Struct, frozen=True, array_like=True, tag=5, gc=False):
    """End all: workers get StopRun and `grace_s` to save and go, then vault and coordinator end."""

    reason: str
    grace_s: float
    code: int = 0


class KeepCopies(Struct, frozen=True, array_like=True, tag=6, gc=False):
    """The node's vault is to keep copies of what those of these nodes stage, and of no others."""

    nodes: tuple[int, ...]


Command: TypeAlias = Spawn | Activate | Kill | Drain | Shutdown | KeepCopies


# ---- worker to agent


class Waiting(Struct, frozen=True, array_like=True, tag=1, gc=False):
    """The worker is in `holdfast.join()`, has rehearsed, and waits for its seat."""


class Active(Struct, frozen=True, array_like=True, tag=2, gc=False):
    """The worker is a member now."""

    incarnation: str
    slot: int
    generation: int


class Drained(Struct, frozen=True, array_like=True, tag=3, gc=False):
    """The worker has left the run; it exits by itself."""


class Finished(Struct, frozen=True, array_like=True, tag=4, gc=False):
    """All steps are done; the worker exits with 0."""


class Failed(Struct, frozen=True, array_like=True, tag=5, gc=False):
    """The program ends with an error: which, in one line."""

    reason: str


class Remark(Struct, frozen=True, array_like=True, tag=6, gc=False):
    """Something that people want to know of the run, in one line."""

    text: str


Word: TypeAlias = Waiting | Active | Drained | Finished | Failed | Remark


# ---- agent to worker


class Take(Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Take this seat of a run of `replicas` times `workers_per_replica`, whose steps have so many lanes.

    All workers round floats to `wire_dtype` for the sum of a step, if it is given.
    """

    seat: Seat
    replicas: int
    workers_per_replica: int
    lanes: int
    wire_dtype: str | None = None


class Leave(Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Leave the run at the next step boundary: this process will be ended in `notice_s`."""

    reason: str
    notice_s: float


class StopRun(Struct, frozen=True, array_like=True, tag=3, gc=False):
    """The whole run stops: save at the step that all agree on, and exit."""

    reason: str
    notice_s: float


Order: TypeAlias = Take | Leave | StopRun
