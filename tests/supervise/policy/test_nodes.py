"""Agents that are lost, nodes that go, room that is missing, and what users ask for: one sentence each."""

from __future__ import annotations

import pytest

from holdfast.supervise import messages as m
from holdfast.supervise.budgets import Allowance
from holdfast.supervise.decisions import KillAgent, NodeOffered, Resize, StartAgent, StopAsked, Tick
from tests.supervise.policy.play import Play

# ---- agents


def test_what_agents_said_while_the_launch_stood_still_is_heard_before_anybody_is_missed() -> None:
    play = Play(replicas=2, nodes=2, training=False)
    play.look()
    play.now += 70.0  # an agent has 60 s to come up
    play.say(m.AgentUp(0, 1), m.AgentUp(1, 1))
    assert play.agents() == []
    play.now += 70.0  # and as long to start a worker
    play.say(m.AgentBeat(0), m.AgentBeat(1), *(m.WorkerStarted(at, one, 1) for one, at in play.where.items()))
    assert play.agents() == []
    assert [node.state for node in play.status.nodes] == ["up", "up"]


def test_a_launch_that_stood_still_gives_agents_the_time_that_they_had_left() -> None:
    """The machine itself was paused: agents have said nothing either, and say it now."""
    play = Play(replicas=1, training=False)
    play.up()
    play.wait(2.0)
    play.look()
    play.now += 500.0
    play.say(Tick())
    assert play.agents() == []
    play.wait(50.0)  # of the 60 s to start a worker 2 were over
    assert play.agents() == []
    play.wait(15.0)
    assert play.agents()[0] == KillAgent(0, "its agent did not start worker 1")


def test_a_lost_agent_is_started_again_and_its_workers_with_it() -> None:
    play = Play(replicas=2, parked=1)
    play.look()
    play.down()
    assert play.agents() == [StartAgent(0)]
    assert [seat.worker for seat in play.status.seats] == [-1, -1]
    play.look()
    play.up()
    spawned = [c for c in play.commands() if isinstance(c, m.Spawn)]
    assert [c.seat for c in spawned] == [m.Seat(0, 0, 1), m.Seat(1, 0, 1), None]
    assert play.kinds().count("AgentLost") == 1


def test_another_node_with_parked_processes_takes_over_at_once() -> None:
    play = Play(nodes=2, replicas=2, parked=1)
    parked = next(one.worker for one in play.status.parked if one.node == 0)
    play.look()
    play.down(1)
    assert (0, m.Activate(parked, m.Seat(1, 0, 1))) in play.fresh_told()


def test_a_silent_agent_is_killed_and_what_it_had_counts_as_lost_when_it_is_gone() -> None:
    play = Play(nodes=2, replicas=2, parked=1, agent_dead_s=5.0)
    play.look()
    for _ in range(11):
        play.now += 0.5
        play.say(m.AgentBeat(0))
    (killed,) = play.agents()
    assert isinstance(killed, KillAgent)
    assert killed.node == 1
    assert play.nodes_of(1) == [1]
    play.down(1)
    assert play.nodes_of(1) == [0]


def test_an_agent_that_does_not_come_up_is_killed_and_tried_again() -> None:
    play = Play(training=False, agent_start_s=30.0)
    play.look()
    play.wait(31.0)
    assert [type(one) for one in play.agents()] == [KillAgent]
    play.down()
    assert play.agents() == [StartAgent(0)]


def test_an_agent_that_comes_up_while_there_is_one_has_lost_its_workers() -> None:
    play = Play(replicas=1)
    play.look()
    play.up()
    assert play.commands() == [m.Spawn(2, m.Seat(0, 0, 1))]


def test_when_this_process_stood_still_no_agent_is_blamed_for_it() -> None:
    play = Play(replicas=1, agent_dead_s=5.0)
    play.look()
    play.now += 60.0
    play.say(m.AgentBeat(0))
    play.wait(4.0)
    assert not play.agents()


def test_the_coordinators_node_whose_agent_is_lost_too_often_ends_the_run() -> None:
    play = Play(replicas=1, allowances={m.AGENT_LOST: Allowance(limit=2, first_s=0.0, longest_s=0.0)})
    for _ in range(3):
        play.up()
        play.down()
    assert play.end is not None
    assert play.end.code == 80
    assert "which has the coordinator" in play.end.message


def test_another_node_whose_agent_is_lost_too_often_is_given_up_for_a_while_and_its_replicas_move() -> None:
    rule = {m.AGENT_LOST: Allowance(limit=1, first_s=0.0, longest_s=0.0)}
    play = Play(nodes=2, replicas=2, allowances=rule, node_retry_s=30.0)
    play.down(1)
    play.up(1)
    play.look()
    play.down(1)
    assert StartAgent(1) not in play.agents()
    assert play.nodes_of(1) == [0]
    play.wait(31.0)
    assert StartAgent(1) in play.agents()


# ---- room


def test_without_room_the_run_goes_on_with_fewer_and_grows_back() -> None:
    rule = {m.AGENT_LOST: Allowance(limit=1, first_s=0.0, longest_s=0.0)}
    play = Play(nodes=2, replicas=2, seats_per_node=1, allowances=rule, node_retry_s=30.0)
    for _ in range(2):
        play.down(1)
        play.up(1)
    play.down(1)
    assert play.status.state == "shrunk"
    assert play.status.seats[1].why == "no node has room for it"
    assert "RunShrunk" in play.kinds()
    play.say(NodeOffered(1))
    play.up(1)
    assert play.nodes_of(1) == [1]
    assert play.status.state == "running"
    assert "RunGrown" in play.kinds()


def test_below_min_replicas_it_waits_and_then_stops_with_75() -> None:
    rule = {m.AGENT_LOST: Allowance(limit=1, first_s=0.0, longest_s=0.0)}
    play = Play(nodes=2, replicas=2, min_replicas=2, seats_per_node=1, allowances=rule, wait_s=100.0)
    for _ in range(2):
        play.down(1)
        play.up(1)
    play.down(1)
    for _ in range(90):
        play.wait(1.0)
        if play.status.nodes[1].state == "starting":
            play.down(1)
    assert play.status.state == "waiting"
    play.wait(20.0)
    assert play.code() == 75
    assert "there was room for 1 replicas, at least 2 are needed" in play.status.message


# ---- preemption, wishes


def test_a_node_that_goes_away_is_drained_first_and_its_seats_are_filled_elsewhere() -> None:
    play = Play(nodes=2, replicas=2)
    leaving = play.holder(1)
    play.look()
    play.say(m.NodePreempted(1, 30.0, "spot notice"))
    told = play.fresh_told()
    assert told[0] == (1, m.Drain(leaving, "node 1 goes away: spot notice"))
    assert told[1] == (0, m.Spawn(3))  # warms up while the other one still works
    play.say(m.WorkerStarted(0, 3, 1), m.WorkerParked(0, 3))
    assert not [c for _, c in play.fresh_told() if isinstance(c, m.Activate)]
    play.say(m.WorkerDrained(1, leaving))
    play.ended(leaving, m.PREEMPTED, 0)
    told = play.fresh_told()
    assert (0, m.Activate(3, m.Seat(1, 0, 1))) in told
    assert any(node == 1 and isinstance(command, m.Shutdown) for node, command in told)
    assert not play.status.failures
    assert "WorkerLost" not in play.kinds()


def test_who_does_not_leave_in_time_is_killed() -> None:
    play = Play(nodes=2, replicas=2)
    leaving = play.holder(1)
    play.say(m.NodePreempted(1, 10.0, "notice"))
    play.look()
    play.wait(9.0)
    assert m.Kill(leaving, "it did not leave in time") in play.commands()


def test_a_node_that_went_away_is_tried_again_later_and_it_is_no_failure() -> None:
    play = Play(nodes=2, replicas=2, node_retry_s=30.0)
    play.say(m.NodePreempted(1, 10.0, "notice"))
    play.down(1)
    assert "AgentLost" not in play.kinds()
    assert not play.status.failures
    play.look()
    play.wait(41.0)
    assert play.agents() == [StartAgent(1)]


@pytest.mark.parametrize(("nodes", "node"), [(1, 0), (2, 0)])
def test_when_the_run_cannot_go_on_without_the_node_it_saves_and_stops_with_75(nodes: int, node: int) -> None:
    play = Play(nodes=nodes, replicas=2, grace_s=60.0)
    play.look()
    play.say(m.NodePreempted(node, 20.0, "SIGTERM"))
    commands = play.commands()
    assert all(isinstance(c, m.Shutdown) and c.grace_s == 16.0 for c in commands)
    assert len(commands) == nodes
    play.finish_up()
    assert play.end is not None
    assert play.end.code == 75


def test_stop_gives_everybody_time_to_save() -> None:
    play = Play(nodes=2, replicas=2, grace_s=7.0)
    play.look()
    play.say(StopAsked("SIGINT"))
    message = "stopped: SIGINT; the same command goes on from what is saved"
    assert play.commands() == [m.Shutdown(message, 7.0, 75)] * 2
    play.down(0)
    assert play.status.state == "stopping"
    play.down(1)
    assert play.end is not None
    assert (play.end.code, play.status.state) == (75, "ended")


def test_agents_that_do_not_end_are_killed_and_the_run_ends_anyway() -> None:
    play = Play(replicas=1, grace_s=5.0, end_s=5.0, kill_s=3.0)
    play.say(StopAsked("SIGINT"))
    play.look()
    play.wait(11.0)
    assert [type(one) for one in play.agents()] == [KillAgent]
    play.wait(4.0)
    assert play.end is not None


def test_stop_at_once_waits_for_nothing() -> None:
    play = Play(nodes=2, replicas=2)
    play.look()
    play.say(StopAsked("SIGINT"), StopAsked("SIGINT", at_once=True))
    assert [type(one) for one in play.agents()] == [KillAgent, KillAgent]
    play.finish_up()
    assert play.end is not None


def test_nothing_is_replaced_while_the_run_ends() -> None:
    play = Play(nodes=2, replicas=2, parked=1)
    play.say(StopAsked("SIGINT"))
    play.look()
    play.ended(play.holder(0), code=-9)
    play.say(Resize(1), NodeOffered(5), m.NodePreempted(1, 5.0, "x"))
    play.down(1)
    assert not play.look()


def test_fewer_replicas_on_wish_leave_between_steps() -> None:
    play = Play(replicas=3)
    leaving = play.holder(2)
    play.look()
    play.say(Resize(2))
    assert play.commands() == [m.Drain(leaving, "fewer replicas are wanted")]
    play.say(m.WorkerDrained(0, leaving))
    play.ended(leaving, m.PREEMPTED, 0)
    assert len(play.status.seats) == 2
    assert not play.look()


def test_more_replicas_on_wish_are_filled_and_attempts_go_on() -> None:
    play = Play(replicas=3, max_replicas=4)
    play.say(Resize(2))
    leaving = play.holder(2)
    play.say(m.WorkerDrained(0, leaving))
    play.ended(leaving, m.PREEMPTED, 0)
    play.look()
    play.say(Resize(4))
    spawned = [c.seat for c in play.commands() if isinstance(c, m.Spawn)]
    assert spawned == [m.Seat(2, 0, 1), m.Seat(3, 0, 0)]


@pytest.mark.parametrize("replicas", [0, 5])
def test_a_wish_beyond_the_limits_is_refused_in_words(replicas: int) -> None:
    play = Play(replicas=3, max_replicas=4)
    play.look()
    play.say(Resize(replicas))
    assert not play.look()
    assert f"refused: {replicas} replicas" in play.status.decisions[-1].text


def test_the_status_says_how_things_stand() -> None:
    play = Play(replicas=2, parked=1, run="demo")
    play.reach(play.holder(0), 12)
    play.ended(play.holder(1), m.HUNG, -9, step=11, detail="stacks in crash/2.stacks")
    status = play.policy.status(now=play.now + 2.0, wall=1e9, pid=77)
    assert (status.run, status.state, status.step, status.pid) == ("demo", "running", 12, 77)
    assert [seat.replica for seat in status.seats] == [0, 1]
    assert status.failures[-1].ago_s == 2.0
    assert "stacks in crash/2.stacks" in status.failures[-1].text
    assert [(b.culprit, b.cause, b.used) for b in status.budgets] == [("replica 1", m.HUNG, 1)]


def test_a_thousand_recoveries_leave_nothing_behind() -> None:
    play = Play(nodes=2, replicas=3, parked=1)
    sizes = []
    for round_ in range(1000):
        play.now += 1.0
        victim = play.holder(round_ % 3)
        play.reach(victim, 4 * round_ + 4)
        play.ended(victim, step=4 * round_ + 4)
        play.train(4 * round_ + 4)
        for node in (0, 1):
            play.say(m.AgentBeat(node))
        roster, verdicts = play.policy._roster, play.policy._verdicts
        sizes.append(
            (
                len(roster.workers), len(roster.alarms), len(roster.alarms._heap) < 300,
                len(roster.said) <= 40, len(roster.failures) <= 20, len(verdicts._poison) <= 1,
                len(roster.decisions),
            )
        )  # fmt: skip
    assert play.code() is None
    assert set(sizes[10:]) == {sizes[-1]}
    assert play.kinds().count("WorkerReplaced") == 1000
