"""The simulator finds bugs: each of these is planted in the policy or in its edge."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from holdfast.supervise.budgets import Budget
from holdfast.supervise.decisions import StopAsked
from holdfast.supervise.messages import WorkerEnded
from holdfast.supervise.nodes import Nodes
from holdfast.supervise.policy import Policy
from holdfast.supervise.roster import (
    COMING,
    ENDING,
    FINISHED,
    LOSING,
    VACANT,
    Node,
    Replica,
    Roster,
    Worker,
)
from holdfast.supervise.seating import Seating
from holdfast.supervise.verdicts import Verdicts
from holdfast.testing.supervision import Failure, simulate

Plant = Callable[[pytest.MonkeyPatch], None]
SEEDS = 1500
"""A planted bug must show within so many seeds; most show within ten."""


def first_failure(seeds: Iterable[int]) -> Failure | None:
    for seed in seeds:
        try:
            simulate(seed)
        except Failure as failure:
            return failure
    return None


def a_seat_is_refilled_while_its_replica_lives(patch: pytest.MonkeyPatch) -> None:
    settle = Seating.settle

    def hasty(self: Seating, replica: Replica) -> None:
        if replica.state == LOSING:
            replica.workers.clear()
        settle(self, replica)

    patch.setattr(Seating, "settle", hasty)


def the_others_of_a_replica_are_not_killed(patch: pytest.MonkeyPatch) -> None:
    def forgetful(self: Seating, worker: Worker, reason: str) -> None:
        worker.state = ENDING

    patch.setattr(Seating, "kill", forgetful)


def parked_processes_are_given_away_twice(patch: pytest.MonkeyPatch) -> None:
    idle = Seating._idle
    last: dict[int, Worker] = {}

    def generous(self: Seating, node: Node) -> Worker | None:
        found = idle(self, node)
        if found is None and (again := last.get(id(self))) is not None and again.number in node.workers:
            return again
        if found is not None:
            last[id(self)] = found
        return found

    patch.setattr(Seating, "_idle", generous)


def a_lost_agent_is_not_started_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Nodes, "_try_again", lambda self, node, reason: None)


def silent_agents_are_not_noticed(patch: pytest.MonkeyPatch) -> None:
    """Found where an agent stands still for good with orders that it does not carry out."""

    def deaf(self: Nodes, number: int) -> None:
        pass

    patch.setattr(Nodes, "silence", deaf)
    patch.setattr(Nodes, "disobeyed", lambda self, worker, what: None)


def workers_of_a_lost_agent_are_remembered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Nodes, "_lose_workers", lambda self, node, reason: None)


def commands_go_to_nodes_that_are_not_up(patch: pytest.MonkeyPatch) -> None:
    site = Roster.site

    def rosy(self: Roster, node: Node) -> object:
        return site(self, node)._replace(up=True)

    patch.setattr(Roster, "site", rosy)


def there_is_no_backoff(patch: pytest.MonkeyPatch) -> None:
    spend = Budget.spend

    def hasty(self: Budget, now: float) -> float | None:
        return None if spend(self, now) is None else 0.0

    patch.setattr(Budget, "spend", hasty)


def budgets_are_never_spent(patch: pytest.MonkeyPatch) -> None:
    spend = Budget.spend
    patch.setattr(Budget, "spend", lambda self, now: spend(self, now) or 0.0)


def budgets_are_spent_one_too_early(patch: pytest.MonkeyPatch) -> None:
    used = Budget.used
    patch.setattr(Budget, "used", lambda self, now: used(self, now) + 1)


def progress_pays_nothing_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Budget, "reset", lambda self: None)


def any_progress_pays_back(patch: pytest.MonkeyPatch) -> None:
    progressed = Verdicts.progressed

    def generous(self: Verdicts, worker: Worker) -> None:
        progressed(self, worker)
        for replica in self._roster.replicas.values():
            for budget in replica.budgets.values():
                budget.reset()

    patch.setattr(Verdicts, "progressed", generous)


def poison_is_not_recognised(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Verdicts, "_suspect_step", lambda self, worker, report: None)


def the_run_is_done_when_the_first_worker_is(patch: pytest.MonkeyPatch) -> None:
    def finished(self: Verdicts, replica: Replica, worker: Worker) -> None:
        replica.state = FINISHED
        for other in list(replica.workers.values()):
            self._roster.forget(other)

    patch.setattr(Verdicts, "_finished", finished)


def who_comes_too_late_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Seating, "wind_up", lambda self: None)


def seats_are_filled_after_the_work_is_done(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Roster, "any_finished", lambda self: False)

    def check(self: Policy) -> None:
        replicas = self._roster.replicas.values()
        if all(replica.state in (FINISHED, VACANT) for replica in replicas) and any(
            replica.state == FINISHED for replica in replicas
        ):
            self._roster.stop(0, "all steps are done")

    patch.setattr(Policy, "_check_done", check)


def drained_workers_count_as_finished(patch: pytest.MonkeyPatch) -> None:
    ended = Verdicts.ended

    def blind(self: Verdicts, worker: Worker, report: WorkerEnded) -> None:
        if worker.state == "left":
            worker.state = "leaving"
        ended(self, worker, report)

    patch.setattr(Verdicts, "ended", blind)


def drained_replicas_stay_empty(patch: pytest.MonkeyPatch) -> None:
    def settle(self: Seating, replica: Replica) -> None:
        if replica.state == LOSING and not replica.workers:
            replica.state = VACANT
            self._roster.dirty = True

    patch.setattr(Seating, "settle", settle)


def the_end_does_not_wait_for_agents(patch: pytest.MonkeyPatch) -> None:
    def at_once(self: Policy) -> None:
        if not self._ended:
            self._ending = True
            self._over()

    patch.setattr(Policy, "_begin_to_end", at_once)


def an_agent_that_comes_up_late_outlives_the_run(patch: pytest.MonkeyPatch) -> None:
    kill = Nodes.kill

    def picky(self: Nodes, node: Node, reason: str) -> None:
        if node.state == COMING and reason == "the run is over":
            node.state = "away"
            return
        kill(self, node, reason)

    patch.setattr(Nodes, "kill", picky)


def a_stop_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def ignored(self: Policy, wish: StopAsked) -> None:
        pass

    patch.setattr(Policy, "_stop_asked", ignored)


def worker_numbers_are_used_again(patch: pytest.MonkeyPatch) -> None:
    new_worker = Roster.new_worker

    def reusing(self: Roster, node: int, seat: object) -> Worker:
        self._next_worker = max(self.workers, default=0) + 1
        return new_worker(self, node, seat)  # type: ignore[arg-type]

    patch.setattr(Roster, "new_worker", reusing)


def the_old_agents_workers_are_kept_for_the_new_one(patch: pytest.MonkeyPatch) -> None:
    lose = Nodes._lose_workers

    def keeping(self: Nodes, node: Node, reason: str) -> None:
        if self._roster.now - node.heard < 1.0:
            return
        lose(self, node, reason)

    patch.setattr(Nodes, "_lose_workers", keeping)


PLANTED: tuple[Plant, ...] = (
    a_seat_is_refilled_while_its_replica_lives,
    the_others_of_a_replica_are_not_killed,
    parked_processes_are_given_away_twice,
    a_lost_agent_is_not_started_again,
    workers_of_a_lost_agent_are_remembered,
    commands_go_to_nodes_that_are_not_up,
    there_is_no_backoff,
    budgets_are_never_spent,
    budgets_are_spent_one_too_early,
    progress_pays_nothing_back,
    any_progress_pays_back,
    poison_is_not_recognised,
    the_run_is_done_when_the_first_worker_is,
    who_comes_too_late_is_waited_for,
    seats_are_filled_after_the_work_is_done,
    drained_workers_count_as_finished,
    drained_replicas_stay_empty,
    the_end_does_not_wait_for_agents,
    an_agent_that_comes_up_late_outlives_the_run,
    a_stop_is_forgotten,
    worker_numbers_are_used_again,
    the_old_agents_workers_are_kept_for_the_new_one,
    silent_agents_are_not_noticed,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    failure = first_failure(range(SEEDS))
    assert failure is not None, f"{SEEDS} seeds did not find it"
    print(f"seed {failure.seed}: {failure.problem[:400]}")


def test_a_failure_says_how_it_came_to_that(monkeypatch: pytest.MonkeyPatch) -> None:
    there_is_no_backoff(monkeypatch)
    failure = first_failure(range(SEEDS))
    assert failure is not None
    with pytest.raises(Failure, match=f"seed {failure.seed}: ") as told:
        simulate(failure.seed, tracing=True)
    assert told.value.problem == failure.problem
    assert "too early" in failure.problem
    assert any("WorkerEnded" in line for line in told.value.trace)
