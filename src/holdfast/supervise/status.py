"""How a run stands, for people and for `holdfast status`: one frozen struct, written as JSON."""

from __future__ import annotations

import math
from typing import Final

from msgspec import Struct

from holdfast.supervise.roster import FILLED, FINISHED, Replica, Roster
from holdfast.supervise.rules import PART

STATUS_FILE: Final = "status.json"
ENDED: Final = "ended"
"""The state of a seat whose worker ended with the run."""


class SeatStatus(Struct, frozen=True):
    """A place in the run. `worker` is -1 if nobody holds it; `why` says why not."""

    replica: int
    index: int
    attempt: int
    state: str
    worker: int = -1
    node: int = -1
    pid: int = 0
    slot: int = -1
    step: int = -1
    phase: str = ""
    median_step_s: float = 0.0
    why: str = ""


class ParkedStatus(Struct, frozen=True):
    worker: int
    node: int
    state: str


class NodeStatus(Struct, frozen=True):
    """`blames` are failures of workers there within the window; a `lemon` has too many of them."""

    node: int
    state: str
    seats: int
    parked: int
    blames: int = 0
    lemon: bool = False
    spare: bool = False
    leaving: bool = False


class BudgetStatus(Struct, frozen=True):
    """What is used of an allowance; those that are untouched are not listed."""

    culprit: str
    cause: str
    used: int
    limit: int


class Saying(Struct, frozen=True):
    """Something that happened or was decided, `ago_s` seconds before the status was taken."""

    ago_s: float
    text: str


class RunStatus(Struct, frozen=True, kw_only=True):
    """A run at one moment. `state`: starting, running, shrunk, waiting, stopping or ended."""

    run: str
    state: str
    wall: float
    """Seconds since 1970 when it was taken; a run whose `pid` is gone is not live any more."""
    pid: int
    replicas: int
    workers_per_replica: int
    min_replicas: int
    step: int
    seats: tuple[SeatStatus, ...]
    parked: tuple[ParkedStatus, ...]
    nodes: tuple[NodeStatus, ...]
    budgets: tuple[BudgetStatus, ...] = ()
    max_replicas: int = 0
    """Most that a resize can ask for; 0 if that is not known."""
    wire_dtype: str | None = None
    """What floats are rounded to for the sums; None if they are not."""
    failures: tuple[Saying, ...] = ()
    decisions: tuple[Saying, ...] = ()
    code: int | None = None
    message: str = ""


def run_status(
    roster: Roster, *, state: str, now: float, wall: float, pid: int, code: int | None, message: str
) -> RunStatus:
    """The status of what the roster holds."""
    settings = roster.settings
    live = [r for r in roster.replicas.values() if r.number < roster.wanted or r.workers]
    idle = [w for w in roster.workers.values() if w.seat is None]
    return RunStatus(
        run=settings.run,
        state=state,
        wall=wall,
        pid=pid,
        replicas=roster.wanted,
        workers_per_replica=settings.workers_per_replica,
        min_replicas=settings.min_replicas,
        max_replicas=settings.most,
        wire_dtype=settings.wire_dtype,
        step=roster.newest,
        seats=tuple(
            _seat(replica, index) for replica in live for index in range(settings.workers_per_replica)
        ),
        parked=tuple(ParkedStatus(w.number, w.node, w.state) for w in idle),
        nodes=tuple(_nodes(roster, now)),
        budgets=tuple(_budgets(roster, now)),
        failures=tuple(Saying(round(now - one.at, 3), one.text) for one in roster.failures),
        decisions=tuple(Saying(round(now - one.at, 3), one.text) for one in roster.said),
        code=code,
        message=message,
    )


def _seat(replica: Replica, index: int) -> SeatStatus:
    worker = replica.workers.get(index)
    if worker is None:
        state = FINISHED if index in replica.finished else replica.state
        if state == FILLED:
            state = ENDED  # with the run: while that goes on, nobody goes from a replica without consequences
        return SeatStatus(replica.number, index, replica.attempt, state, why=replica.why)
    return SeatStatus(
        replica.number, index, replica.attempt, worker.state, worker.number, worker.node, worker.pid,
        worker.slot, worker.step, worker.phase, worker.median_step_s, replica.why,
    )  # fmt: skip


def _nodes(roster: Roster, now: float) -> list[NodeStatus]:
    found = []
    for node in roster.nodes.values():
        seats = sum(worker.seat is not None for worker in node.workers.values())
        blames = sum(at > now - roster.settings.lemon_window_s for at in node.blames)
        found.append(
            NodeStatus(
                node.number, node.state, seats, len(node.workers) - seats, blames, node.lemon, node.spare,
                node.leaves_at < math.inf,
            )
        )  # fmt: skip
    return found


def _budgets(roster: Roster, now: float) -> list[BudgetStatus]:
    found = []
    for replica in roster.replicas.values():
        for cause, budget in replica.budgets.items():
            if used := budget.used(now):
                limit = budget.allowance.limit
                found.append(BudgetStatus(f"replica {replica.number}", cause, used, limit))
    for node in roster.nodes.values():
        for cause, budget in (("agent lost", node.budget), ("parking", node.parking)):
            if used := budget.used(now):
                found.append(BudgetStatus(f"node {node.number}", cause, used, budget.allowance.limit))
    for name, budget in roster.parts.items():
        if used := budget.used(now):
            found.append(BudgetStatus(name, PART, used, budget.allowance.limit))
    return found
