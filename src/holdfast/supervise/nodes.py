"""Agents: starting them, noticing that one is gone or silent, and nodes that say they will go."""

from __future__ import annotations

import math
from typing import Final, final

from holdfast.journal import AgentLost, NodeLeaving, WorkerLost
from holdfast.supervise.decisions import RETRY_CODE, SPENT_CODE, KillAgent, StartAgent
from holdfast.supervise.messages import AGENT_LOST, AgentUp, NodePreempted, Shutdown
from holdfast.supervise.placement import room
from holdfast.supervise.roster import (
    AWAY,
    COMING,
    DYING,
    FILLED,
    LEFT,
    LOSING,
    UP,
    Failure,
    Node,
    Replica,
    Roster,
    Worker,
)
from holdfast.supervise.seating import Seating
from holdfast.supervise.verdicts import Verdicts

_HASTE: Final = 0.8
"""Of the time until a node goes, workers get so much to leave it."""


@final
class Nodes:
    """The nodes of the run, one agent each."""

    def __init__(self, roster: Roster, seating: Seating, verdicts: Verdicts) -> None:
        self._roster = roster
        self._seating = seating
        self._verdicts = verdicts

    # ---- coming

    def start(self, node: Node) -> None:
        """Have its agent started."""
        roster = self._roster
        node.state, node.heard, node.dismissed = COMING, roster.now, False
        node.leaves_at = math.inf
        roster.decisions.append(StartAgent(node.number))
        roster.alarms.set("agent", node.number, roster.now + roster.settings.agent_start_s)
        roster.alarms.clear("start", node.number)
        roster.dirty = True
        roster.version += 1

    def start_due(self, number: int) -> None:
        if self._roster.nodes[number].state == AWAY:
            self.start(self._roster.nodes[number])

    def offered(self, number: int) -> None:
        """There is a node that was not there."""
        roster = self._roster
        node = roster.nodes.get(number) or roster.add_node(number)
        if node.state == AWAY:
            roster.say(f"node {number} can be used")
            node.budget.reset()
            self.start(node)

    def came(self, report: AgentUp) -> None:
        roster = self._roster
        node = roster.nodes[report.node]
        if node.state == UP:
            # Another agent than the one that was there: workers die with theirs.
            self._lose_workers(node, "its agent was started again")
        if node.state not in (UP, COMING):
            return  # it is being ended, or was given up
        node.state, node.pid, node.parts, node.heard = UP, report.pid, report.parts, roster.now
        node.copies = ()  # an agent begins with none
        roster.alarms.set("agent", node.number, roster.now + roster.settings.agent_dead_s)
        roster.dirty = True
        roster.version += 1

    # ---- going

    def silence(self, number: int) -> None:
        """The time by which something should have been heard of an agent has come."""
        roster, settings = self._roster, self._roster.settings
        node = roster.nodes[number]
        if node.state == UP:
            silent = roster.now - node.heard
            if silent < settings.agent_dead_s:
                roster.alarms.set("agent", number, node.heard + settings.agent_dead_s)
            else:
                self.kill(node, f"its agent was silent for {silent:.1f} s")
        elif node.state == COMING:
            self.kill(node, f"its agent did not come up in {settings.agent_start_s:g} s")
        elif node.state == DYING:
            # The edge did not say that it is gone. Nothing more can be done about it from here.
            self.gone(number, "its agent could not be ended")

    def kill(self, node: Node, reason: str) -> None:
        """End an agent that does not work; its workers die with it."""
        roster = self._roster
        if node.state in (UP, COMING):
            node.state = DYING
            roster.say(f"the agent of node {node.number} is killed: {reason}")
            roster.decisions.append(KillAgent(node.number, reason))
            roster.alarms.set("agent", node.number, roster.now + roster.settings.kill_s)

    def disobeyed(self, worker: Worker | None, what: str) -> None:
        """An agent has not done as it was told."""
        if worker is not None:
            node = self._roster.nodes[worker.node]
            self.kill(node, f"its agent did not {what} worker {worker.number}")

    def gone(self, number: int, reason: str) -> None:
        """An agent is gone, and its workers with it."""
        roster = self._roster
        node = roster.nodes[number]
        if node.state == AWAY:
            return
        leaving = node.leaves_at < math.inf
        was_up = node.state != COMING
        node.state = AWAY
        roster.alarms.clear("agent", number)
        roster.alarms.clear("park", number)
        self._lose_workers(node, "it left with its node" if leaving else reason)
        roster.dirty = True
        roster.version += 1
        if roster.verdict is not None:
            return  # as it should be
        if leaving:
            back_at = max(roster.now, node.leaves_at) + roster.settings.node_retry_s
            roster.alarms.set("start", number, back_at)
            return
        if was_up:
            roster.note(AgentLost(number, reason))
        roster.failures.append(Failure(roster.now, f"the agent of node {number} is lost: {reason}"))
        self._try_again(node, reason)
        if was_up:
            self._verdicts.blame(node, f"agent lost: {reason}")

    def _try_again(self, node: Node, reason: str) -> None:
        """Have a lost agent started again, at once or later."""
        roster, settings = self._roster, self._roster.settings
        delay = node.budget.spend(roster.now)
        if delay is not None:
            roster.alarms.set("start", node.number, roster.now + delay)
        elif node.number == settings.coordinator_node:
            used = node.budget.used(roster.now)
            roster.stop(
                SPENT_CODE,
                f"the agent of node {node.number}, which has the coordinator, was lost {used} times within "
                f"{node.budget.allowance.window_s:g} s without progress: {reason}",
            )
        else:
            roster.say(f"node {node.number} is given up for {settings.node_retry_s:g} s: {reason}")
            roster.alarms.set("start", node.number, roster.now + settings.node_retry_s)

    def _lose_workers(self, node: Node, reason: str) -> None:
        """Everybody on the node is dead; that counts once, against the node."""
        roster = self._roster
        hit: list[Replica] = []
        for worker in list(node.workers.values()):
            roster.forget(worker)
            if worker.seat is None:
                continue
            replica = roster.replicas[worker.seat.replica]
            if replica.state == FILLED and worker.state != LEFT:
                roster.note(
                    WorkerLost(
                        worker.number, replica.number, worker.seat.index, node.number, AGENT_LOST, 0,
                        worker.step, worker.phase, reason,
                    )
                )  # fmt: skip
            hit.append(replica)
        for replica in hit:
            if replica.state == FILLED:
                replica.state = LOSING
            self._seating.lose(replica, f"node {node.number}: {reason}")

    # ---- leaving

    def preempted(self, report: NodePreempted) -> None:
        """A node goes away: whoever works there leaves between two steps, and it is nobody's failure."""
        roster, settings = self._roster, self._roster.settings
        node = roster.nodes[report.node]
        if node.leaves_at < math.inf:
            return
        roster.note(NodeLeaving(node.number, report.notice_s, report.reason))
        node.leaves_at = roster.now + report.notice_s
        roster.dirty = True
        left = room(roster.sites(), settings.workers_per_replica)
        if node.number == settings.coordinator_node or left < settings.min_replicas:
            why = "it has the coordinator" if left >= settings.min_replicas else f"there is room for {left}"
            roster.stop(
                RETRY_CODE,
                f"node {node.number} goes away ({report.reason}) and the run cannot go on without it: {why}; "
                "start it again to go on from what is saved",
                min(settings.grace_s, _HASTE * report.notice_s),
            )
            return
        for replica in list(roster.replicas.values()):
            if any(worker.node == node.number for worker in replica.workers.values()):
                reason = f"node {node.number} goes away: {report.reason}"
                self._seating.drain(replica, reason, _HASTE * report.notice_s)
        self.dismiss(node)

    def dismiss(self, node: Node) -> None:
        """Once nobody works on a node that goes away, its agent is to end all that is left there."""
        if node.leaves_at == math.inf or node.dismissed or node.state != UP:
            return
        if any(worker.seat is not None for worker in node.workers.values()):
            return
        node.dismissed = True
        grace_s = max(0.0, node.leaves_at - self._roster.now)
        self._roster.tell(node.number, Shutdown("the node goes away", grace_s))
