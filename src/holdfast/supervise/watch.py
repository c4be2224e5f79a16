"""Which worker hangs: from what its board says and what the system says about it. Pure.

    no progress         within the deadline of its phase, while it waits in no named call      hung
    stopped             (SIGSTOP) for `stopped_s`, in any phase                                stopped
    uses no CPU         for `stall_s` and twice its median step, and does no step,
                        while it waits in no named call nor for the disk (phase "save")        stalled
    stays parked        for `step_s` after it was given a seat                                 hung

A worker that waits in a named Holdfast call waits for others: it is not the culprit, whoever it waits for is.
So does one in a step while a mate of its world, on the same node, is at something else (a save, a compile):
in a collective it waits for that one, whose phase has its own deadline. Its own then begins when that ends.
Time in which nobody could look (`unseen`) counts for none of these: all of the machine may have stood still.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, final

from holdfast.errors import UsageError
from holdfast.supervise.board import PHASES, Reading
from holdfast.supervise.messages import HUNG, STALLED, STOPPED

_STEP: Final = "step"
_PARKED: Final = "parked"
_SAVE: Final = "save"
_KNOWN_STEPS: Final = 3
"""Steps after which the median of a worker's steps says how long one takes."""


def _phase_defaults() -> dict[str, float]:
    return {
        "start": 300.0,
        "import": 300.0,
        "init": 300.0,
        "compile": 1800.0,
        "restore": 600.0,
        "save": 600.0,
        "eval": 1800.0,
        "shutdown": 60.0,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """When a worker counts as hung. Seconds.

    `phases` has one deadline for each phase but "step" and "parked"; one that is missing has its default, and
    a phase that is not known has that of "eval". A step may take `step_s`, or `step_factor` times the median
    of the last ones; as long as there is no median, `first_step_s`.
    """

    phases: dict[str, float] = field(default_factory=dict)
    step_s: float = 10.0
    step_factor: float = 10.0
    first_step_s: float = 60.0
    stopped_s: float = 1.0
    stall_s: float = 60.0
    stall_cpu_s: float = 0.1
    """CPU time that a stalled process may use in `stall_s`: heartbeats go on in threads of their own."""

    def __post_init__(self) -> None:
        strangers = sorted(set(self.phases) - (set(PHASES) - {_STEP, _PARKED}))
        if strangers:
            raise UsageError(
                f"no deadline can be set for phase {strangers[0]!r}",
                hint=f"one of: {', '.join(sorted(_phase_defaults()))}; a step has step_s and step_factor",
            )
        numbers = (*self.phases.values(), self.step_s, self.step_factor, self.first_step_s)
        if min((*numbers, self.stopped_s, self.stall_s)) <= 0:
            raise UsageError(f"a deadline that is not above 0: {self}", hint="give seconds above 0")

    @property
    def longest_s(self) -> float:
        """So long a worker may be busy with one thing, at most, before it counts as hung."""
        return max(*{**_phase_defaults(), **self.phases}.values(), self.step_s, self.first_step_s)

    def of(self, reading: Reading) -> float | None:
        """How long this worker may go without a sign of progress; None: for ever."""
        if reading.phase == _PARKED:
            return None
        if reading.phase != _STEP:
            defaults = _phase_defaults()
            return self.phases.get(reading.phase) or defaults.get(reading.phase) or defaults["eval"]
        if reading.num_steps < _KNOWN_STEPS:
            return max(self.step_s, self.first_step_s)
        return max(self.step_s, self.step_factor * reading.median_step_s)


class Facts(NamedTuple):
    """What the system says about a process: its state (one letter of /proc), CPU time of all its threads."""

    state: str
    cpu_s: float


class Verdict(NamedTuple):
    """A worker hangs: the cause of `holdfast.supervise.messages`, since when, and the words for people."""

    cause: str
    since: float
    detail: str


@final
class Watch:
    """Watches one worker. Give it what was read, as often as you like: it needs a few looks a second."""

    def __init__(self, deadlines: Deadlines, *, now: float) -> None:
        self._deadlines = deadlines
        self._stopped_since: float | None = None
        self._busy_at = now
        self._busy_cpu_s = 0.0
        self._seated_at: float | None = None
        self._mates_came_at = now
        """When a mate was last seen at something else than a step."""
        self._since = now
        """Since when the worker shows no progress."""
        self._unseen_s = 0.0
        """Of the time since then."""
        self._newly_unseen_s = 0.0

    def unseen(self, seconds: float) -> None:
        """Nobody looked for so long before the next look, and perhaps nothing ran."""
        self._newly_unseen_s += seconds
        self._busy_at += seconds
        if self._stopped_since is not None:
            self._stopped_since += seconds

    def seated(self, now: float) -> None:
        """The worker was given a seat: it has no reason to stay parked."""
        self._seated_at = now

    def look(self, reading: Reading, facts: Facts, now: float, mates: Iterable[str] = ()) -> Verdict | None:
        """Whether the worker hangs. `mates` are the phases of the others of its world that can be seen."""
        seated_at = self._seated_at if reading.phase == _PARKED else None
        since = _idle_since(reading) if seated_at is None else seated_at
        if any(phase not in (_STEP, _PARKED) for phase in mates):
            self._mates_came_at = now
        if reading.phase == _STEP:
            since = max(since, self._mates_came_at)
        if since != self._since:
            self._since, self._unseen_s = since, 0.0
        self._unseen_s += self._newly_unseen_s
        self._newly_unseen_s = 0.0
        if seated_at is not None:
            return self._stopped(facts, now) or self._deaf(now)
        return self._stopped(facts, now) or self._hung(reading, now) or self._stalled(reading, facts, now)

    def _stopped(self, facts: Facts, now: float) -> Verdict | None:
        if facts.state != "T":
            self._stopped_since = None
            return None
        if self._stopped_since is None:
            self._stopped_since = now
        since = self._stopped_since
        if now - since < self._deadlines.stopped_s:
            return None
        return Verdict(STOPPED, since, f"the process is stopped (SIGSTOP) for {now - since:.1f} s")

    def _hung(self, reading: Reading, now: float) -> Verdict | None:
        limit = self._deadlines.of(reading)
        if reading.waiting and reading.pulsed_at <= reading.waiting_since:
            return None  # a wait that gives no signs of life
        spent = self._spent(now)
        if limit is None or spent < limit:
            return None
        what = f"the wait in {reading.waiting}" if reading.waiting else f"phase {reading.phase!r}"
        return Verdict(
            HUNG, self._since, f"no progress in {what} for {spent:.1f} s ({limit:g} s are allowed)"
        )

    def _deaf(self, now: float) -> Verdict | None:
        limit, spent = self._deadlines.step_s, self._spent(now)
        if spent < limit:
            return None
        detail = f"it has not taken the seat that it was given {spent:.1f} s ago"
        return Verdict(HUNG, self._since, f"{detail} ({limit:g} s are allowed)")

    def _spent(self, now: float) -> float:
        return now - self._since - self._unseen_s

    def _stalled(self, reading: Reading, facts: Facts, now: float) -> Verdict | None:
        deadlines = self._deadlines
        used = facts.cpu_s - self._busy_cpu_s
        # A worker whose device does the work needs next to no CPU: who comes on does not stall.
        # One that waits for a disk needs none either; the deadline of its phase bounds that.
        idles = reading.phase in (_PARKED, _SAVE)
        came_on = max(reading.progressed_at, self._mates_came_at if reading.phase == _STEP else 0.0)
        lives = reading.waiting or idles or came_on > self._busy_at
        if lives or not 0 <= used < deadlines.stall_cpu_s:
            self._busy_at, self._busy_cpu_s = now, facts.cpu_s
            return None
        idle = now - self._busy_at
        usual = 2 * reading.median_step_s if reading.phase == _STEP else 0.0
        if idle < max(deadlines.stall_s, usual):
            return None
        detail = f"used {used:.2f} s of CPU in {idle:.1f} s of phase {reading.phase!r}, waiting for nobody"
        return Verdict(STALLED, self._busy_at, detail)


def _idle_since(reading: Reading) -> float:
    """Since when a worker shows no progress."""
    since = max(reading.phase_since, reading.progressed_at if reading.phase == _STEP else 0.0)
    # A wait that once gave signs of life and gives none any more: its process is locked up. Whoever came out
    # of a wait for others has only now something to do.
    return max(since, reading.pulsed_at if reading.waiting else reading.waiting_since)
