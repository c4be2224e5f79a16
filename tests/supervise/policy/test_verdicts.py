"""What an end means: budgets, poison steps and lemon nodes, one sentence each."""

from __future__ import annotations

import pytest

from holdfast.supervise import messages as m
from holdfast.supervise.budgets import Allowance
from tests.supervise.policy.play import Play

ALL_CAUSES = (m.CRASHED, m.HUNG, m.STOPPED, m.STALLED, m.OUT_OF_MEMORY)


# ---- budgets


@pytest.mark.parametrize("cause", ALL_CAUSES)
def test_a_budget_that_is_spent_stops_the_run_with_80_and_names_cause_count_and_culprit(cause: str) -> None:
    play = Play(replicas=2, allowances={cause: Allowance(limit=2, first_s=0.0, longest_s=0.0)})
    for _ in range(3):
        assert play.code() is None
        worker = play.holder(1)
        play.active(worker, 0)
        play.ended(worker, cause, 1, phase="init", detail="ValueError: no")
    assert play.code() == 80
    for word in (f"3 times {cause}", "replica 1", "2 are allowed", "ValueError: no"):
        assert word in play.status.message
    assert "BudgetSpent" in play.kinds()
    play.finish_up()
    assert play.end is not None
    assert play.end.code == 80


def test_a_script_that_never_comes_to_a_step_ends_the_run_soon_and_says_why() -> None:
    play = Play(replicas=2, training=False)
    play.up()
    began = play.now
    for _ in range(3):
        assert play.code() is None
        while play.holder(0) < 0:
            play.wait(0.25)
        play.ended(play.holder(0), code=1, step=-1, phase="import", detail="ImportError: no nmpy")
    assert play.code() == 80
    assert play.now - began < 5.0
    for word in (f"3 times {m.CRASHED} in import", "first step", "replica 0", "ImportError: no nmpy"):
        assert word in play.status.message
    assert "BudgetSpent" in play.kinds()


def test_replicas_that_fail_together_at_the_start_are_tried_again() -> None:
    play = Play(replicas=4, training=False)
    play.up()
    for replica in range(4):
        play.ended(play.holder(replica), step=-1, phase="import")
    assert play.code() is None
    play.train()
    assert play.code() is None


def test_a_run_that_has_come_to_a_step_is_not_given_up_so_soon() -> None:
    play = Play(replicas=2, allowances={m.CRASHED: Allowance(limit=9, first_s=0.0, longest_s=0.0)})
    for _ in range(5):
        play.ended(play.holder(1), step=-1, phase="import")
    assert play.code() is None


def test_each_further_attempt_waits_twice_as_long() -> None:
    play = Play(replicas=1, allowances={m.CRASHED: Allowance(limit=9, first_s=1.0, longest_s=3.0)})
    waits = []
    for _ in range(5):
        play.ended(play.holder(0), phase="init")
        before = play.now
        while play.holder(0) < 0:
            assert "before the next attempt" in play.status.seats[0].why
            play.wait(0.25)
        waits.append(play.now - before)
    assert waits == [0.0, 1.0, 2.0, 3.0, 3.0]


def test_progress_gives_a_budget_back() -> None:
    play = Play(replicas=1, allowances={m.CRASHED: Allowance(limit=1, first_s=0.0)}, progress_steps=3)
    for step in range(10, 100, 10):
        worker = play.holder(0)
        play.active(worker, step)
        play.reach(worker, step + 3)
        play.ended(worker, step=step + 3)
    assert play.code() is None


def test_going_over_old_steps_again_is_no_progress() -> None:
    play = Play(replicas=1, allowances={m.CRASHED: Allowance(limit=2, first_s=0.0, longest_s=0.0)})
    play.reach(play.holder(0), 50)
    for _ in range(3):
        worker = play.holder(0)
        play.active(worker, 40)
        play.reach(worker, 49)
        play.ended(worker, step=49, phase="save")
    assert play.code() == 80


def test_the_progress_of_others_does_not_pay_for_a_replica() -> None:
    play = Play(replicas=2, allowances={m.CRASHED: Allowance(limit=2, first_s=0.0, longest_s=0.0)})
    for step in range(10, 40, 10):
        play.reach(play.holder(0), step)
        play.ended(play.holder(1), step=-1, phase="init")
    assert play.code() == 80


def test_failures_outside_the_window_do_not_count() -> None:
    rule = Allowance(limit=1, window_s=60.0, first_s=0.0, longest_s=0.0)
    play = Play(replicas=1, allowances={m.CRASHED: rule})
    for _ in range(5):
        play.ended(play.holder(0), phase="init")
        play.active(play.holder(0), 0)
        play.wait(61.0)
    assert play.code() is None


@pytest.mark.parametrize("cause", [m.PREEMPTED, m.KILLED])
def test_preempted_and_killed_are_free(cause: str) -> None:
    play = Play(replicas=1)
    for _ in range(30):
        play.ended(play.holder(0), cause, -9)
        play.wait(15.0)
        play.active(play.holder(0), 0)
    assert play.code() is None


def test_exit_code_75_is_tried_again_and_counts() -> None:
    play = Play(replicas=1, allowances={m.CRASHED: Allowance(limit=1, first_s=0.0)})
    play.ended(play.holder(0), code=75, phase="init")
    assert play.holder(0) > 0
    play.ended(play.holder(0), code=75, phase="init")
    assert play.code() == 80


@pytest.mark.parametrize("code", [78, 79, 80])
def test_a_worker_that_says_so_stops_the_run_at_once(code: int) -> None:
    play = Play(replicas=3)
    play.look()
    play.ended(play.holder(1), code=code, detail="no such data set")
    assert [type(command) for command in play.commands()] == [m.Shutdown]
    assert "no such data set" in play.status.message
    play.down()
    assert play.end is not None
    assert play.end.code == code


def test_parked_processes_that_fail_are_given_up_and_the_run_goes_on() -> None:
    play = Play(replicas=1, parked=1)
    for _ in range(10):
        for parked in play.status.parked:
            play.ended(parked.worker, phase="import")
        play.started()
        play.wait(20.0)
        play.started()
    assert not play.status.parked
    assert play.code() is None
    assert any("no more processes are parked on node 0" in one.text for one in play.status.decisions)


def test_parts_that_are_killed_while_the_run_makes_progress_are_started_again_for_ever() -> None:
    play = Play(replicas=1)
    for step in range(3, 300, 3):
        play.say(m.PartLost(0, "coordinator", "SIGKILL"))
        play.reach(play.holder(0), step)
        play.wait(1.0)
    assert play.code() is None


def test_parts_that_die_again_and_again_stop_the_run() -> None:
    play = Play(replicas=1)
    for _ in range(20):
        play.say(m.PartLost(0, "vault", "killed by SIGKILL"))
    assert play.code() is None
    play.say(m.PartLost(0, "vault", "killed by SIGKILL"))
    assert play.code() == 80
    assert "the vault of node 0" in play.status.message


def test_what_is_used_of_the_budgets_of_parts_is_in_the_status_at_once() -> None:
    play = Play(replicas=1)
    before = play.policy.version
    play.say(*(m.PartLost(0, part, "SIGKILL") for part in ("vault", "coordinator", "vault")))
    assert play.policy.version != before
    used = [(one.culprit, one.cause, one.used, one.limit) for one in play.status.budgets]
    assert used == [
        ("the vault of node 0", "part lost", 2, 20),
        ("the coordinator of node 0", "part lost", 1, 20),
    ]
    play.reach(play.holder(0), 3)
    assert play.status.budgets == ()


# ---- blame


def test_a_step_that_fails_again_and_again_stops_the_run_with_79_and_is_named() -> None:
    play = Play(replicas=2, poison_failures=3, allowances={m.CRASHED: Allowance(limit=9, first_s=0.0)})
    for _ in range(3):
        assert play.code() is None
        worker = play.holder(0)
        play.now += 1.0
        play.active(worker, 57)
        play.now += 1.0
        play.ended(worker, step=57, detail="NaN in lane 3")
        play.now += 10.0
    assert play.code() == 79
    assert "step 57 has failed 3 times" in play.status.message
    assert "NaN in lane 3" in play.status.message
    assert "StepPoisoned" in play.kinds()


def test_workers_that_fall_together_are_one_failure_of_the_step() -> None:
    play = Play(replicas=4, poison_failures=3)
    for replica in range(4):
        play.ended(play.holder(replica), code=-9, step=0)
    assert play.code() is None


def test_failures_of_different_workers_at_one_step_add_up() -> None:
    play = Play(replicas=3, poison_failures=3)
    for replica in (0, 1, 2):
        play.now += 1.0
        play.active(play.holder(replica), 8)
        play.now += 1.0
        # It was started again since the last failure of the step.
        play.ended(play.holder(replica), m.KILLED, -9, step=8)
        play.wait(15.0)
        play.active(play.holder(replica), 8)
        play.now += 1.0
        play.ended(play.holder(replica), m.HUNG, -9, step=8)
    assert play.code() == 79


def test_a_step_that_others_are_past_is_not_to_blame() -> None:
    play = Play(replicas=2, poison_failures=1)
    play.reach(play.holder(0), 58)
    play.ended(play.holder(1), step=57)
    assert play.code() is None


def test_failures_outside_a_step_blame_no_step() -> None:
    play = Play(replicas=1, poison_failures=1)
    play.ended(play.holder(0), step=5, phase="restore")
    assert play.code() is None


def test_a_node_that_is_blamed_again_and_again_is_named_and_its_seats_move() -> None:
    play = Play(nodes=2, replicas=4, lemon_blames=3, progress_steps=1)
    for step in range(10, 40, 10):
        victim = next(s.worker for s in play.status.seats if s.node == 1)
        play.reach(victim, step)
        play.ended(victim, step=step)
        play.train(step)
        play.wait(10.0)
    assert "NodeBlamed" in play.kinds()
    assert [node.lemon for node in play.status.nodes] == [False, True]
    for seat in play.status.seats:
        if seat.node == 1:
            assert seat.state == "leaving"
            play.say(
                m.WorkerDrained(1, seat.worker), m.WorkerEnded(1, seat.worker, m.PREEMPTED, 0, 30, "step")
            )
    assert {node for r in range(4) for node in play.nodes_of(r)} == {0}


def test_no_node_is_a_lemon_where_all_fail_alike() -> None:
    play = Play(
        nodes=2, replicas=2, lemon_blames=3, allowances={m.CRASHED: Allowance(limit=0, longest_s=1.0)}
    )
    for _ in range(10):
        for replica in (0, 1):
            play.ended(play.holder(replica), phase="init")
        play.wait(2.0)
        play.train()
    assert not any(node.lemon for node in play.status.nodes)


def test_the_only_node_is_never_a_lemon() -> None:
    play = Play(replicas=1, lemon_blames=1)
    play.ended(play.holder(0))
    assert not play.status.nodes[0].lemon
