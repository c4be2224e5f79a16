"""How a run starts, goes on after a worker is lost, and ends: the rules of the policy, one sentence each."""

from __future__ import annotations

import pytest

from holdfast.errors import UsageError
from holdfast.supervise import messages as m
from holdfast.supervise.budgets import Allowance
from holdfast.supervise.decisions import KillAgent, StartAgent, StopAsked
from holdfast.supervise.rules import PolicySettings
from tests.supervise.policy.play import Play

# ---- starting


def test_it_starts_every_agent_and_no_worker_before_one_is_up() -> None:
    play = Play(training=False, nodes=3, replicas=3)
    assert play.agents() == [StartAgent(0), StartAgent(1), StartAgent(2)]
    assert not play.told


def test_replicas_are_spread_over_the_nodes_whoever_comes_up_first() -> None:
    play = Play(training=False, nodes=2, replicas=4)
    play.up(1)
    play.up(0)
    assert sorted(play.nodes_of(r)[0] for r in range(4)) == [0, 0, 1, 1]


def test_a_replica_lies_on_one_node_where_it_fits() -> None:
    play = Play(nodes=2, replicas=2, workers_per_replica=2, seats_per_node=2)
    assert {tuple(play.nodes_of(r)) for r in range(2)} == {(0, 0), (1, 1)}


def test_a_replica_that_fits_on_no_node_is_spread() -> None:
    play = Play(nodes=2, replicas=1, workers_per_replica=4, seats_per_node=2)
    assert play.nodes_of(0) == [0, 0, 1, 1]


def test_each_node_gets_its_parked_processes() -> None:
    play = Play(nodes=2, replicas=2, parked=2)
    assert sorted(one.node for one in play.status.parked) == [0, 0, 1, 1]


def test_spares_are_kept_free() -> None:
    play = Play(nodes=3, replicas=4, spares=1)
    assert {node for r in range(4) for node in play.nodes_of(r)} == {0, 1}


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UsageError, match="min_replicas=3 is more than replicas=2") as told:
        PolicySettings(
            replicas=2, min_replicas=3, nodes=1, spares=1, allowances={"bad luck": Allowance(limit=1)}
        )
    assert "leaves none of nodes=1" in str(told.value)
    assert "no such cause: bad luck" in str(told.value)
    with pytest.raises(UsageError, match=r"^replicas=0 is less than 1\n"):
        PolicySettings(replicas=0)
    with pytest.raises(UsageError, match="max_replicas=1 is less than replicas=2"):
        PolicySettings(replicas=2, max_replicas=1)
    with pytest.raises(UsageError, match="makes no sense"):
        Allowance(limit=-1)


# ---- a worker is lost


def test_a_lost_worker_is_replaced_by_a_parked_one_and_another_is_parked() -> None:
    play = Play(replicas=2, parked=1)
    lost, parked = play.holder(0), play.status.parked[0].worker
    play.look()
    play.ended(lost, code=-9)
    commands = play.commands()
    assert commands[0] == m.Activate(parked, m.Seat(0, 0, 1))
    assert isinstance(commands[1], m.Spawn)
    assert commands[1].seat is None
    assert play.holder(0) == parked
    assert {"WorkerLost", "WorkerReplaced"} <= set(play.kinds())


def test_a_process_that_warms_up_is_better_than_a_new_one() -> None:
    play = Play(replicas=1, parked=1)
    play.ended(play.holder(0), code=-9)  # takes the parked one; the next is on its way
    warming = play.status.parked[0]
    assert warming.state == "starting"
    play.reach(play.holder(0), 0)
    play.active(play.holder(0), 50)
    play.look()
    play.ended(play.holder(0), code=-9, step=50)
    assert m.Activate(warming.worker, m.Seat(0, 0, 2)) in play.commands()


def test_without_a_parked_process_a_new_one_is_started_on_the_same_node() -> None:
    play = Play(nodes=2, replicas=2)
    play.look()
    play.ended(play.holder(1))
    assert play.fresh_told() == [(1, m.Spawn(3, m.Seat(1, 0, 1)))]


def test_a_parked_process_of_another_node_is_better_than_a_new_one() -> None:
    play = Play(nodes=2, replicas=2, parked=1)
    play.ended(play.status.parked[1].worker, phase="parked")  # node 1 has none now
    play.look()
    play.ended(play.holder(1))
    assert play.nodes_of(1) == [0]


def test_a_spare_node_comes_before_a_new_process() -> None:
    play = Play(nodes=3, replicas=2, spares=1)
    play.ended(play.holder(1))
    assert play.nodes_of(1) == [2]


def test_the_other_workers_of_its_replica_are_killed_and_all_are_replaced_together() -> None:
    play = Play(replicas=2, workers_per_replica=2)
    lost, other = play.holder(1, 0), play.holder(1, 1)
    play.look()
    play.ended(lost)
    (command,) = play.commands()
    assert isinstance(command, m.Kill)
    assert command.worker == other
    play.ended(other, m.KILLED, -9)
    spawned = play.commands()
    assert [c.seat for c in spawned if isinstance(c, m.Spawn)] == [m.Seat(1, 0, 1), m.Seat(1, 1, 1)]
    assert play.kinds().count("WorkerLost") == 1


def test_nobody_gets_a_seat_whose_last_holder_may_live() -> None:
    play = Play(replicas=1, workers_per_replica=2, parked=2)
    play.look()
    play.ended(play.holder(0, 0))
    assert not [c for c in play.commands() if isinstance(c, m.Activate | m.Spawn)]
    assert play.status.seats[0].state == "losing"


def test_an_agent_that_does_not_end_a_worker_is_killed() -> None:
    play = Play(replicas=1, workers_per_replica=2, kill_s=10.0)
    play.ended(play.holder(0, 0))
    play.look()
    play.wait(11.0)
    assert [type(one) for one in play.agents()] == [KillAgent]


def test_an_agent_that_does_not_start_a_worker_is_killed() -> None:
    play = Play(training=False, replicas=1, spawn_s=20.0)
    play.up()
    play.look()
    play.wait(21.0)
    (killed,) = play.agents()
    assert isinstance(killed, KillAgent)
    assert "did not start worker 1" in killed.reason


def test_a_word_about_somebody_unknown_changes_nothing() -> None:
    play = Play(replicas=2)
    play.look()
    play.say(
        m.WorkerEnded(0, 99, m.CRASHED, 1, 3, "step"),
        m.WorkerEnded(1, play.holder(0), m.CRASHED, 1, 3, "step"),
        m.WorkerProgress(0, 98, 1, "step", 0.1),
        m.AgentBeat(7),
    )
    assert not play.look()


# ---- the end of the work


def test_when_all_have_finished_the_run_is_done() -> None:
    play = Play(replicas=2, parked=1)
    play.ended(play.holder(0), m.DONE, 0, step=100)
    assert play.code() is None
    play.look()
    play.ended(play.holder(1), m.DONE, 0, step=100)
    assert [type(command) for command in play.commands()] == [m.Shutdown]
    play.down()
    assert play.end is not None
    assert (play.end.code, play.end.message) == (0, "all steps are done")
    assert play.kinds()[-1] == "RunEnded"


def test_who_fails_after_another_replica_has_finished_is_not_replaced() -> None:
    play = Play(replicas=2, parked=1)
    play.ended(play.holder(0), m.DONE, 0, step=100)
    play.look()
    play.ended(play.holder(1), phase="shutdown", step=100)
    assert [type(command) for command in play.commands()] == [m.Shutdown]
    assert play.code() == 0


def test_a_newcomer_is_not_waited_for_once_all_steps_are_done() -> None:
    play = Play(replicas=2)
    play.ended(play.holder(1))
    newcomer = play.holder(1)
    play.look()
    play.ended(play.holder(0), m.DONE, 0, step=100)
    assert m.Kill(newcomer, "all steps are done") in play.commands()


def test_who_does_not_finish_when_all_others_have_is_ended() -> None:
    play = Play(replicas=2, finish_s=30.0)
    stuck = play.holder(1)
    play.ended(play.holder(0), m.DONE, 0, step=100)
    play.look()
    play.wait(31.0)
    assert m.Kill(stuck, "all steps are done") in play.commands()
    play.ended(stuck, m.KILLED, -9)
    assert play.code() == 0


def test_a_program_that_never_joins_may_end_and_it_is_said() -> None:
    play = Play(replicas=1, training=False)
    play.up()
    play.started()
    play.ended(play.holder(0), m.DONE, 0, step=-1, phase="import")
    assert play.code() == 0
    assert "never took part in the run" in play.status.message
    assert "replica 0 has ended; it never joined" in [one.text for one in play.status.decisions]


def test_who_ends_before_it_joins_while_others_train_has_not_done_their_steps() -> None:
    play = Play(replicas=2)
    play.ended(play.holder(1))
    play.started()
    newcomer = play.holder(1)
    play.ended(newcomer, m.DONE, 0, step=-1, phase="import")
    assert play.code() is None
    assert [one.state for one in play.status.seats] == ["active", "vacant"]
    assert play.status.failures[-1].text == f"worker {newcomer} (replica 1, node 0) crashed (0) in import"


def test_the_status_of_a_run_that_has_ended_has_its_last_step_and_no_seat_is_filled() -> None:
    play = Play(replicas=2)
    play.say(StopAsked("SIGINT"))
    for replica in (0, 1):
        play.ended(play.holder(replica), m.DONE, 0, step=57)
    assert play.status.step == 57
    assert [one.state for one in play.status.seats] == ["ended", "ended"]
    assert (play.status.min_replicas, play.status.max_replicas) == (1, 2)


def test_half_a_replica_that_has_finished_is_nothing() -> None:
    play = Play(replicas=1, workers_per_replica=2)
    play.ended(play.holder(0, 0), m.DONE, 0, step=100)
    play.ended(play.holder(0, 1), phase="save", step=100)
    assert [seat.attempt for seat in play.status.seats] == [1, 1]
    assert play.code() is None
