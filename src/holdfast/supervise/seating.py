"""Seats: giving them to processes, taking them away, and keeping processes parked for them."""

from __future__ import annotations

import math
from typing import final

from holdfast.journal import RunGrown, RunShrunk, WorkerReplaced
from holdfast.supervise.decisions import RETRY_CODE
from holdfast.supervise.messages import Activate, Drain, Kill, Seat, Spawn
from holdfast.supervise.placement import Place, first_place, next_place
from holdfast.supervise.roster import (
    ACTIVE,
    DRAINING,
    ENDING,
    FILLED,
    LEAVING,
    LEFT,
    LOSING,
    READY,
    SEATED,
    STARTING,
    UP,
    VACANT,
    WARMING,
    Node,
    Replica,
    Roster,
    Worker,
)


@final
class Seating:
    """Fills what is vacant, in the order of remedies; what cannot be filled is said and kept in mind."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.unplaced: set[int] = set()
        """Replicas for which there is no room."""

    # ---- filling

    def fill(self) -> None:
        """Give every vacant seat to a process, where there is one or room for one."""
        roster = self._roster
        if roster.any_finished():
            return  # all steps are done: nobody is needed any more
        planned: dict[int, int] = {}
        for replica in roster.wanted_replicas():
            if replica.state != VACANT:
                continue
            if replica.due > roster.now:
                replica.why = f"waits {replica.due - roster.now:.1f} s before the next attempt"
                roster.alarms.set("due", replica.number, replica.due)
                continue
            place = self._place(replica, planned)
            if place is None:
                self._unplaceable(replica)
            elif not place.up:
                replica.why = f"waits for the agent of node {place.nodes[0]}"
                planned[place.nodes[0]] = planned.get(place.nodes[0], 0) + len(place.nodes)
            else:
                self._seat(replica, place)
        self._judge_size()

    def _place(self, replica: Replica, planned: dict[int, int]) -> Place | None:
        """A place for the replica, as if those who wait for a node were there already."""
        sites = [
            site._replace(load=site.load + more, free=site.free - more) if more else site
            for site in self._roster.sites()
            for more in (planned.get(site.node, 0),)
        ]
        width = self._roster.settings.workers_per_replica
        if replica.attempt < 0:
            return first_place(sites, width)
        return next_place(sites, width, replica.last_node)

    def _seat(self, replica: Replica, place: Place) -> None:
        roster = self._roster
        again = replica.attempt >= 0
        replica.attempt += 1
        replica.state, replica.why, replica.last_node = FILLED, "", place.nodes[0]
        replica.finished.clear()
        roster.alarms.clear("due", replica.number)
        for index, number in enumerate(place.nodes):
            seat = Seat(replica.number, index, replica.attempt)
            worker = self._idle(roster.nodes[number])
            if worker is not None:
                worker.seat = seat
                if worker.state == READY:
                    worker.state = SEATED
                roster.tell(number, Activate(worker.number, seat))
            else:
                worker = roster.new_worker(number, seat)
                roster.tell(number, Spawn(worker.number, seat))
            replica.workers[index] = worker
            if again:
                roster.note(
                    WorkerReplaced(
                        worker.number, replica.number, index, number, replica.attempt, place.remedy
                    )
                )
        if again:
            nodes = ", ".join(str(node) for node in sorted(set(place.nodes)))
            roster.say(
                f"replica {replica.number} goes on, attempt {replica.attempt}: {place.remedy} on node {nodes}"
            )
        if replica.number in self.unplaced:
            self.unplaced.discard(replica.number)
            roster.note(
                RunGrown(roster.filled(), roster.wanted, f"there is room for replica {replica.number}")
            )
        roster.version += 1

    def _idle(self, node: Node) -> Worker | None:
        """A process without a seat: one that is parked, else the one that is closest to it."""
        order = {READY: 0, WARMING: 1, STARTING: 2}
        idle = [w for w in node.workers.values() if w.seat is None and w.state in order]
        return min(idle, key=lambda w: (order[w.state], w.number), default=None)

    def _unplaceable(self, replica: Replica) -> None:
        replica.why = "no node has room for it"
        if replica.number not in self.unplaced:
            self.unplaced.add(replica.number)
            roster = self._roster
            roster.say(f"no node has room for replica {replica.number}: go on without it")
            roster.note(RunShrunk(roster.filled(), roster.wanted, replica.why))

    def _judge_size(self) -> None:
        """Too small to go on: wait for room, for so long and no longer."""
        roster, settings = self._roster, self._roster.settings
        self.unplaced = {n for n in self.unplaced if n < roster.wanted and roster.replicas[n].state == VACANT}
        have = roster.wanted - len(self.unplaced)
        if have >= min(settings.min_replicas, roster.wanted):
            roster.alarms.clear("room", 0)
        elif not roster.alarms.is_set("room", 0):
            roster.alarms.set("room", 0, roster.now + settings.wait_s)
            roster.say(
                f"there is room for {have} of at least {settings.min_replicas} replicas: wait "
                f"{settings.wait_s:g} s for more"
            )

    def no_room(self) -> None:
        """Waited long enough."""
        roster, settings = self._roster, self._roster.settings
        have = roster.wanted - len(self.unplaced)
        roster.stop(
            RETRY_CODE,
            f"for {settings.wait_s:g} s there was room for {have} replicas, at least {settings.min_replicas} "
            f"are needed; start the run again when there are more nodes",
        )

    # ---- parked processes

    def top_up(self) -> None:
        """Start processes to be parked, where there are fewer than there should be."""
        roster = self._roster
        if roster.any_finished():
            return
        for node in roster.nodes.values():
            if not (node.state == UP and node.usable):
                continue
            site = roster.site(node)
            short = roster.settings.parked - site.ready - site.warming
            if short > 0 and not (node.lemon and site.load == 0):
                self._park(node, short)
        self._park_for_those_who_leave()

    def _park_for_those_who_leave(self) -> None:
        """A seat that is about to be vacant gets a warm process now, not when it is."""
        roster = self._roster
        leaving = [r for r in roster.wanted_replicas() if r.state == DRAINING]
        sites = [site for site in roster.sites() if site.up]
        short = len(leaving) * roster.settings.workers_per_replica
        short -= sum(site.ready + site.warming for site in sites)
        for site in sorted(sites, key=lambda site: (site.lemon, site.load, site.node)):
            count = int(min(short, site.free - site.ready - site.warming))
            if count > 0:
                self._park(roster.nodes[site.node], count)
                short -= count

    def _park(self, node: Node, count: int) -> None:
        roster = self._roster
        if node.parks_at > roster.now:
            if node.parks_at < math.inf:
                roster.alarms.set("park", node.number, node.parks_at)
            return
        for _ in range(count):
            worker = roster.new_worker(node.number, None)
            roster.tell(node.number, Spawn(worker.number))

    # ---- taking away

    def lose(self, replica: Replica, reason: str) -> None:
        """End what is left of a replica; its seats are vacant once nobody is left."""
        replica.state = LOSING
        self._roster.alarms.clear("drain", replica.number)
        for worker in replica.workers.values():
            self.kill(worker, reason)
        self.settle(replica)

    def kill(self, worker: Worker, reason: str) -> None:
        if worker.state != ENDING:
            worker.state = ENDING
            self._roster.tell(worker.node, Kill(worker.number, reason))
            self._roster.alarms.set("kill", worker.number, self._roster.now + self._roster.settings.kill_s)

    def drain(self, replica: Replica, reason: str, within_s: float) -> None:
        """Let a replica leave the run between two steps; whoever takes no part yet is just ended."""
        if replica.state != FILLED:
            return
        roster = self._roster
        replica.state = DRAINING
        roster.say(f"replica {replica.number} leaves at its next step: {reason}")
        roster.alarms.set("drain", replica.number, roster.now + within_s)
        for worker in replica.workers.values():
            if worker.state == ACTIVE:
                worker.state = LEAVING
                roster.tell(worker.node, Drain(worker.number, reason))
            else:
                self.kill(worker, reason)
        roster.dirty = True
        self.settle(replica)

    def move_away(self, node: Node) -> None:
        """Let the replicas on a node that is to be blamed leave it, where they can go elsewhere."""
        roster, settings = self._roster, self._roster.settings
        for replica in list(roster.wanted_replicas()):
            here = any(worker.node == node.number for worker in replica.workers.values())
            if not here or replica.state != FILLED or roster.filled() <= settings.min_replicas:
                continue
            width = settings.workers_per_replica
            elsewhere = [site for site in roster.sites() if site.node != node.number and site.up]
            if first_place(elsewhere, width) is not None:
                self.drain(replica, f"node {node.number} fails too often", settings.drain_s)

    def undrained(self, number: int) -> None:
        """The time to leave is over."""
        replica = self._roster.replicas.get(number)
        if replica is not None and replica.state == DRAINING:
            self.lose(replica, "it did not leave in time")

    def settle(self, replica: Replica) -> None:
        """A replica that was lost or drained is vacant once all its processes are gone."""
        if replica.state in (LOSING, DRAINING) and not replica.workers:
            self._roster.alarms.clear("drain", replica.number)
            replica.state, replica.why = VACANT, "lost" if replica.state == LOSING else "left"
            self._roster.dirty = True
            self._roster.version += 1

    def wind_up(self) -> None:
        """All steps are done: who takes part may finish, in time; who was on the way is not needed."""
        roster = self._roster
        if not roster.alarms.is_set("finish", 0):
            roster.alarms.set("finish", 0, roster.now + roster.settings.finish_s)
        for replica in list(roster.replicas.values()):
            # Nobody is left to form a generation with.
            if any(worker.state not in (ACTIVE, LEAVING, LEFT) for worker in replica.workers.values()):
                self.lose(replica, "all steps are done")

    def unfinished(self) -> None:
        """The others have finished long ago: the work is done, and whoever still holds on to it is stuck."""
        for replica in list(self._roster.replicas.values()):
            if replica.workers:
                self._roster.say(f"replica {replica.number} did not finish in time; the others did")
                self.lose(replica, "all steps are done")

    # ---- on wish

    def resize(self, replicas: int) -> None:
        """Go on with more or fewer replicas."""
        roster, settings = self._roster, self._roster.settings
        if not settings.min_replicas <= replicas <= settings.most:
            roster.say(
                f"refused: {replicas} replicas are not between min_replicas={settings.min_replicas} and "
                f"max_replicas={settings.most}"
            )
            return
        before, roster.wanted = roster.wanted, replicas
        for number in range(replicas):
            roster.replicas.setdefault(number, Replica(number))
        if replicas > before:
            roster.note(RunGrown(before, replicas, "asked for"))
        elif replicas < before:
            roster.note(RunShrunk(before, replicas, "asked for"))
        roster.say(f"{replicas} replicas are wanted, there were {before}")
        for number in sorted(roster.replicas):
            if number >= replicas:
                # Kept when it is empty: its attempts are never counted anew.
                roster.alarms.clear("due", number)
                self.drain(roster.replicas[number], "fewer replicas are wanted", settings.drain_s)
        roster.dirty = True
