"""What is done about failures: a deterministic state machine over the whole run.

    policy = Policy(settings)
    decisions = policy.begin(now=...)               # once
    decisions = policy.step(happening, now=...)     # for every report, wish and Tick, in order
    policy.wake_at                                  # when to send a Tick, after all that has been heard

`now` is seconds on a clock that never goes back; the policy has no other, and no socket, thread or random
number. Its parts: `seating` gives seats to processes, `verdicts` says what an end means, `nodes` minds the
agents, `copying` says whose states vaults copy.

A run ends in one way only: `Roster.stop` gives the reason and the code, agents are told to end everything,
and when the last one is gone, or the time for it is over, comes the End.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

from holdfast.journal import RunEnded, RunStarted
from holdfast.supervise.copying import Copying
from holdfast.supervise.decisions import (
    DONE_CODE,
    RETRY_CODE,
    AgentDown,
    Decision,
    End,
    Happening,
    NodeOffered,
    Resize,
    StopAsked,
    Tick,
)
from holdfast.supervise.messages import (
    AgentBeat,
    AgentUp,
    NodePreempted,
    PartLost,
    Shutdown,
    WorkerActive,
    WorkerDrained,
    WorkerEnded,
    WorkerParked,
    WorkerProgress,
    WorkerStarted,
)
from holdfast.supervise.nodes import Nodes
from holdfast.supervise.roster import (
    ACTIVE,
    AWAY,
    COMING,
    LEAVING,
    LEFT,
    READY,
    SEATED,
    STARTING,
    UP,
    WARMING,
    Roster,
    Worker,
)
from holdfast.supervise.rules import PolicySettings
from holdfast.supervise.seating import Seating
from holdfast.supervise.status import RunStatus, run_status
from holdfast.supervise.verdicts import NOT_JOINED, Verdicts

_LATE_S: Final = 1.0
"""A step that comes so late means that this process itself stood still."""


@final
class Policy:
    """Decides everything about failures in one run."""

    def __init__(self, settings: PolicySettings) -> None:
        self._roster = Roster(settings)
        self._seating = Seating(self._roster)
        self._verdicts = Verdicts(self._roster, self._seating)
        self._nodes = Nodes(self._roster, self._seating, self._verdicts)
        self._copying = Copying(self._roster)
        self._ending = False
        self._ended = False
        workers = self._roster.workers
        self._due: dict[str, Callable[[int], None]] = {
            "agent": self._nodes.silence,
            "start": self._nodes.start_due,
            "spawn": lambda of: self._nodes.disobeyed(workers.get(of), "start"),
            "kill": lambda of: self._nodes.disobeyed(workers.get(of), "end"),
            "drain": self._seating.undrained,
            "due": lambda of: None,  # that it is filled now is done after every alarm
            "park": lambda of: None,
            "finish": lambda of: self._seating.unfinished(),
            "room": lambda of: self._seating.no_room(),
            "end": lambda of: self._end_by_force(),
            "over": lambda of: self._over(),
        }

    @property
    def wake_at(self) -> float:
        """When the next Tick is due; inf if there is nothing to wait for."""
        return self._roster.alarms.next_at()

    @property
    def version(self) -> int:
        """Another number whenever the status is another."""
        return self._roster.version

    @property
    def ended(self) -> bool:
        return self._ended

    def status(self, *, now: float, wall: float = 0.0, pid: int = 0) -> RunStatus:
        """How the run stands."""
        code, message, _ = self._roster.verdict or (None, "", 0.0)
        return run_status(
            self._roster, state=self._state(), now=now, wall=wall, pid=pid, code=code, message=message
        )

    def _state(self) -> str:
        roster = self._roster
        if self._ended or self._ending:
            return "ended" if self._ended else "stopping"
        if roster.alarms.is_set("room", 0):
            return "waiting"
        if self._seating.unplaced:
            return "shrunk"
        return "running" if roster.newest >= 0 else "starting"

    # ---- events

    def begin(self, *, now: float) -> list[Decision]:
        """Have all agents started."""
        roster, settings = self._roster, self._roster.settings
        roster.now = now
        roster.note(RunStarted(settings.replicas, settings.workers_per_replica, settings.nodes))
        for node in list(roster.nodes.values()):
            self._nodes.start(node)
        return self._take()

    def step(self, happening: Happening, *, now: float) -> list[Decision]:
        """The decisions that follow from one thing that happened. Nothing outside is looked at or changed."""
        roster = self._roster
        if self._ended:
            return []
        self._credit(now)
        roster.now = now
        if type(happening) is Tick:
            self._ring(now)
        else:
            self._take_in(happening)
        if roster.dirty:
            roster.dirty = False
            self._follow_up()
        return self._take()

    def _ring(self, now: float) -> None:
        """Alarms ring for a Tick alone: whatever was reported before they were due has been heard by then."""
        while (alarm := self._roster.alarms.pop_due(now)) is not None:
            self._roster.dirty = True
            self._due[alarm[0]](alarm[1])

    def _take(self) -> list[Decision]:
        decisions, self._roster.decisions = self._roster.decisions, []
        return decisions

    def _credit(self, now: float) -> None:
        """If this process itself was away, nobody is late for what it should have done in that time."""
        late = now - self._roster.alarms.next_at()
        if late > _LATE_S:
            self._roster.alarms.postpone(late)
            for node in self._roster.nodes.values():
                node.heard = min(now, node.heard + late)

    def _take_in(self, happening: Happening) -> None:
        roster = self._roster
        match happening:
            case AgentDown():
                if happening.node in roster.nodes:
                    self._nodes.gone(happening.node, happening.reason)
            case NodeOffered():
                if not self._ending:
                    self._nodes.offered(happening.node)
            case Resize():
                if not self._ending:
                    self._seating.resize(happening.replicas)
            case StopAsked():
                self._stop_asked(happening)
            case Tick():
                pass
            case _:
                node = roster.nodes.get(happening.node)
                if node is not None and (node.state == UP or isinstance(happening, AgentUp)):
                    node.heard = roster.now
                    self._reported(happening)

    def _reported(self, report: Happening) -> None:
        """A word of an agent that counts."""
        match report:
            case AgentBeat():
                pass
            case AgentUp():
                self._nodes.came(report)
                if self._ending and self._roster.nodes[report.node].state == UP:
                    self._shut_down(report.node)
            case PartLost():
                self._verdicts.part_lost(report.node, report.part, report.reason)
                self._roster.dirty = True
            case NodePreempted():
                if not self._ending:
                    self._nodes.preempted(report)
            case (
                WorkerStarted()
                | WorkerParked()
                | WorkerActive()
                | WorkerProgress()
                | WorkerDrained()
                | WorkerEnded()
            ):
                worker = self._roster.workers.get(report.worker)
                # One that was given up with its node is not known any more.
                if worker is not None and worker.node == report.node:
                    self._of_worker(worker, report)

    def _of_worker(
        self,
        worker: Worker,
        report: WorkerStarted | WorkerParked | WorkerActive | WorkerProgress | WorkerDrained | WorkerEnded,
    ) -> None:
        roster = self._roster
        roster.version += 1
        match report:
            case WorkerStarted():
                worker.pid = report.pid
                roster.alarms.clear("spawn", worker.number)
                if worker.state == STARTING:
                    worker.state = WARMING
            case WorkerParked():
                if worker.state in (STARTING, WARMING):
                    worker.state = SEATED if worker.seat is not None else READY
                    roster.dirty = True
                    roster.nodes[worker.node].parking.reset()
            case WorkerActive():
                worker.slot = report.slot
                roster.joined = roster.dirty = True
                if worker.state in (STARTING, WARMING, SEATED):
                    worker.state, worker.active_since = ACTIVE, roster.now
                    worker.floor = roster.newest
            case WorkerProgress():
                if worker.step < 0 <= report.step:
                    roster.dirty = True  # from now on it holds the state
                worker.step, worker.phase = report.step, report.phase
                worker.median_step_s = report.median_step_s
                if worker.state in (ACTIVE, LEAVING) and worker.floor < 0:
                    worker.floor = report.step
                self._verdicts.progressed(worker)
            case WorkerDrained():
                if worker.state == LEAVING:
                    worker.state = LEFT
            case WorkerEnded():
                if self._ending:
                    roster.forget(worker)
                else:
                    self._verdicts.ended(worker, report)
                self._verdicts.reached(report.step)

    def _follow_up(self) -> None:
        """After whatever changed: end the run if it is to end, else see that everybody has a seat."""
        roster = self._roster
        if self._ended:
            return
        if not self._ending:
            self._check_done()
            if roster.verdict is None:
                for node in roster.nodes.values():
                    self._nodes.dismiss(node)
                self._seating.fill()
            if roster.verdict is None:
                self._seating.top_up()
                self._copying.update()
                return
            self._begin_to_end()
        if all(node.state == AWAY for node in roster.nodes.values()):
            self._over()

    # ---- the end

    def _check_done(self) -> None:
        """All steps are done once a whole replica has done them: every replica holds the same state."""
        roster = self._roster
        if roster.any_finished() and not any(replica.workers for replica in roster.replicas.values()):
            roster.stop(DONE_CODE, "all steps are done" if roster.joined else NOT_JOINED)

    def _stop_asked(self, wish: StopAsked) -> None:
        self._roster.stop(RETRY_CODE, f"stopped: {wish.reason}; the same command goes on from what is saved")
        self._roster.dirty = True
        if wish.at_once:
            self._begin_to_end()
            self._end_by_force()

    def _begin_to_end(self) -> None:
        roster, settings = self._roster, self._roster.settings
        assert roster.verdict is not None
        if self._ending:
            return
        self._ending = True
        roster.version += 1
        for kind in ("due", "drain"):
            for number in roster.replicas:
                roster.alarms.clear(kind, number)
        for kind in ("room", "finish"):
            roster.alarms.clear(kind, 0)
        for node in roster.nodes.values():
            roster.alarms.clear("start", node.number)
            roster.alarms.clear("park", node.number)
            if node.state == UP:
                self._shut_down(node.number)
            elif node.state == COMING:
                self._nodes.kill(node, "the run is over")
        roster.alarms.set("end", 0, roster.now + roster.verdict[2] + settings.end_s)

    def _shut_down(self, node: int) -> None:
        assert self._roster.verdict is not None
        code, message, grace_s = self._roster.verdict
        self._roster.tell(node, Shutdown(message, grace_s, code))

    def _end_by_force(self) -> None:
        """Agents that are still there have had their time."""
        roster = self._roster
        roster.alarms.clear("end", 0)
        for node in roster.nodes.values():
            self._nodes.kill(node, "the run is over")
        roster.alarms.set("over", 0, roster.now + roster.settings.kill_s)
        roster.dirty = True

    def _over(self) -> None:
        roster = self._roster
        assert roster.verdict is not None
        code, message, _ = roster.verdict
        self._ended = True
        roster.version += 1
        roster.note(RunEnded(code, message))
        roster.decisions.append(End(code, message))
