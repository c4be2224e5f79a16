"""What the end of a worker means: whose failure it is, how often it may happen, and what is to be blamed."""

from __future__ import annotations

import math
from typing import Final, NamedTuple, final

import msgspec

from holdfast.journal import BudgetSpent, NodeBlamed, StepPoisoned, WorkerLost
from holdfast.supervise.budgets import Budget
from holdfast.supervise.decisions import NO_RETRY_CODE, POISON_CODE, SPENT_CODE
from holdfast.supervise.messages import CRASHED, DONE, WorkerEnded
from holdfast.supervise.roster import (
    DRAINING,
    ENDING,
    FILLED,
    FINISHED,
    LEFT,
    Failure,
    Node,
    Replica,
    Roster,
    Worker,
)
from holdfast.supervise.rules import FREE, PART
from holdfast.supervise.seating import Seating

FINAL_CODES: Final = (NO_RETRY_CODE, POISON_CODE, SPENT_CODE)
"""Exit codes with which a worker says that trying again is no use."""
NOT_JOINED: Final = "the program has ended with 0; it never took part in the run (holdfast.join)"
_STEP: Final = "step"


class Poison(NamedTuple):
    """How often a step failed, and when last."""

    failures: int
    at: float


@final
class Verdicts:
    """Budgets of replicas and parts, poison steps and lemon nodes."""

    def __init__(self, roster: Roster, seating: Seating) -> None:
        self._roster = roster
        self._seating = seating
        self._poison: dict[int, Poison] = {}
        self._part_floors: dict[str, int] = {}
        """How far the run had come when a part was lost last."""

    # ---- ends

    def ended(self, worker: Worker, report: WorkerEnded) -> None:
        """A process is gone, as its agent saw it."""
        roster = self._roster
        wanted = worker.state == ENDING
        worker.step = max(worker.step, report.step)
        roster.forget(worker)
        if not wanted and report.code in FINAL_CODES:
            self._lost(worker, report)
            if worker.seat is not None:  # the others of its replica cannot save without it
                replica = roster.replicas[worker.seat.replica]
                self._seating.lose(replica, f"{roster.name_of(worker)} {report.cause}")
            hint = report.detail or "look at its log"
            roster.stop(report.code, f"{roster.name_of(worker)} ended with {report.code}: {hint}")
            return
        if worker.seat is None:
            if not wanted:
                self._not_parked(worker, report)
            return
        replica = roster.replicas[worker.seat.replica]
        if report.cause == DONE and roster.joined and worker.active_since == -math.inf:
            # Others train: a process that ends before it takes part has not done their steps.
            report = msgspec.structs.replace(report, cause=CRASHED)
        if report.cause == DONE and report.code == 0 and worker.state != LEFT and not wanted:
            self._finished(replica, worker)
        elif replica.state == FILLED:
            self._failed(replica, worker, report)
        else:
            # It was to go, whatever it died of.
            if replica.state == DRAINING and not wanted and worker.state != LEFT:
                self._seating.lose(replica, "another worker of its replica ended")
            self._seating.settle(replica)

    def _finished(self, replica: Replica, worker: Worker) -> None:
        assert worker.seat is not None
        replica.finished.add(worker.seat.index)
        width = self._roster.settings.workers_per_replica
        if len(replica.finished) == width:
            roster = self._roster
            replica.state, replica.why = (
                FINISHED,
                "all steps are done" if roster.joined else "it never joined",
            )
            roster.alarms.clear("drain", replica.number)
            roster.say(
                f"replica {replica.number} has {'finished' if roster.joined else 'ended; it never joined'}"
            )
            self._seating.wind_up()
        else:
            self._seating.settle(replica)

    def _failed(self, replica: Replica, worker: Worker, report: WorkerEnded) -> None:
        roster = self._roster
        self._lost(worker, report)
        self._seating.lose(replica, f"{roster.name_of(worker)} {report.cause}")
        if roster.any_finished():
            return  # all steps are done: nobody takes its place
        self._count(replica, worker, report)
        if report.cause not in FREE:
            self._suspect_step(worker, report)
            self.blame(roster.nodes[worker.node], f"{roster.name_of(worker)}: {report.cause}")

    def _lost(self, worker: Worker, report: WorkerEnded) -> None:
        roster = self._roster
        replica, index = (worker.seat.replica, worker.seat.index) if worker.seat is not None else (-1, -1)
        roster.note(
            WorkerLost(
                worker.number, replica, index, worker.node, report.cause, report.code, report.step,
                report.phase, report.detail,
            )
        )  # fmt: skip
        where = f"at step {report.step} in {report.phase}" if report.step >= 0 else f"in {report.phase}"
        text = f"{roster.name_of(worker)} {report.cause} ({report.code}) {where}"
        roster.failures.append(Failure(roster.now, f"{text}: {report.detail}" if report.detail else text))

    # ---- budgets

    def _count(self, replica: Replica, worker: Worker, report: WorkerEnded) -> None:
        roster = self._roster
        budget = replica.budgets.get(report.cause)
        if budget is None:
            budget = replica.budgets[report.cause] = Budget(roster.settings.allowance(report.cause))
        delay = budget.spend(roster.now)
        if delay is None:
            self._spent(budget, report.cause, roster.name_of(worker), report.detail)
        elif self._stillborn(budget, report):
            used, culprit = budget.used(roster.now), roster.name_of(worker)
            roster.note(BudgetSpent(report.cause, used, budget.allowance.window_s, culprit))
            tail = f": {report.detail}" if report.detail else ""
            roster.stop(
                SPENT_CODE,
                f"{used} times {report.cause} in {report.phase} before the run came to its first step; the "
                f"last was {culprit}{tail}",
            )
        else:
            replica.due = roster.now + delay

    def _stillborn(self, budget: Budget, report: WorkerEnded) -> bool:
        """Whether the program itself does not work: nobody ever came to a step, and it ends alike each time.

        Trying on would take minutes, and nothing is lost by giving up: nothing was trained.
        """
        roster = self._roster
        if report.cause in FREE or roster.newest >= 0 or report.step >= 0:
            return False
        return budget.run >= roster.settings.stillborn_failures

    def _spent(self, budget: Budget, cause: str, culprit: str, detail: str) -> None:
        roster, window_s = self._roster, budget.allowance.window_s
        used = budget.used(roster.now)
        roster.note(BudgetSpent(cause, used, window_s, culprit))
        tail = f": {detail}" if detail else ""
        roster.stop(
            SPENT_CODE,
            f"{used} times {cause} within {window_s:g} s without progress, {budget.allowance.limit} are "
            f"allowed; the last was {culprit}{tail}",
        )

    def _not_parked(self, worker: Worker, report: WorkerEnded) -> None:
        """A process that ended before anybody needed it costs the run nothing, unless it goes on so."""
        roster = self._roster
        node = roster.nodes[worker.node]
        delay = node.parking.spend(roster.now)
        node.parks_at = math.inf if delay is None else roster.now + delay
        text = f"{roster.name_of(worker)} {report.cause} ({report.code}) before it was needed"
        roster.failures.append(Failure(roster.now, text))
        if delay is None:
            roster.say(f"no more processes are parked on node {node.number}: {text}")

    def part_lost(self, node: int, part: str, reason: str) -> None:
        """The vault or the coordinator had to be started again."""
        roster = self._roster
        name = f"the {part} of node {node}"
        roster.failures.append(Failure(roster.now, f"{name} was started again: {reason}"))
        budget = roster.parts.setdefault(name, Budget(roster.settings.allowance(PART)))
        self._part_floors[name] = roster.newest
        roster.version += 1
        if budget.spend(roster.now) is None:
            self._spent(budget, PART, name, reason)

    def progressed(self, worker: Worker) -> None:
        """A worker has reached another step; enough of them give budgets back."""
        roster = self._roster
        self.reached(worker.step)
        if worker.proven or worker.seat is None or worker.floor < 0 or worker.state == ENDING:
            return
        if worker.step >= worker.floor + roster.settings.progress_steps:
            worker.proven = True
            replica = roster.replicas[worker.seat.replica]
            for budget in (*replica.budgets.values(), roster.nodes[worker.node].budget):
                budget.reset()

    def reached(self, step: int) -> None:
        """The run has come so far: earlier steps are not to blame for anything."""
        if step <= self._roster.newest:
            return
        self._roster.newest = step
        self._poison = {at: found for at, found in self._poison.items() if at >= step}
        # Workers outlive the parts, so it is the run whose progress pays for those.
        for name, floor in list(self._part_floors.items()):
            if step >= floor + self._roster.settings.progress_steps:
                self._roster.parts[name].reset()
                del self._part_floors[name]

    # ---- blame

    def _suspect_step(self, worker: Worker, report: WorkerEnded) -> None:
        """Count failures of one step; those who fell together with the last one do not count again."""
        roster, step = self._roster, report.step
        if report.phase != _STEP or step < max(0, roster.newest):
            return  # others are past it
        before = self._poison.get(step, Poison(0, -math.inf))
        if before.failures and worker.active_since <= before.at:
            return
        self.reached(step)
        found = self._poison[step] = Poison(before.failures + 1, roster.now)
        if found.failures >= roster.settings.poison_failures:
            reason = report.detail or f"{report.cause} ({report.code})"
            roster.note(StepPoisoned(step, found.failures, reason))
            roster.stop(
                POISON_CODE,
                f"step {step} has failed {found.failures} times, last for {roster.name_of(worker)}: {reason}",
            )

    def blame(self, node: Node, reason: str) -> None:
        """A failure happened on the node; one that has far more of them than all others is a lemon."""
        roster, settings = self._roster, self._roster.settings
        node.blames.append(roster.now)
        if node.lemon:
            return
        counts = {one.number: self._blames(one) for one in roster.nodes.values() if one is not node}
        others = [n for n in roster.nodes.values() if n is not node and n.usable and not n.lemon]
        mine = self._blames(node)
        worst = max(counts.values(), default=0)
        if not others or mine < settings.lemon_blames or mine < 3 * worst:
            return
        node.lemon = True
        roster.note(NodeBlamed(node.number, mine, reason))
        roster.say(
            f"node {node.number} is used no more while there are others: {mine} failures there within "
            f"{settings.lemon_window_s:g} s, {worst} on the next worst"
        )
        self._seating.move_away(node)

    def _blames(self, node: Node) -> int:
        since = self._roster.now - self._roster.settings.lemon_window_s
        while node.blames and node.blames[0] <= since:
            node.blames.popleft()
        return len(node.blames)
