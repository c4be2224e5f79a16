"""What an operator can set about a coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from holdfast.errors import UsageError

ALWAYS: Final = "always"
PROCESS: Final = "process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The rules of one run. Times in seconds.

    Who is in: a generation has between `min_size` and `max_size` members, a multiple of `divisible_by`. Once
    enough have joined, a round waits `last_call_s` for more (`recall_s` at most in a run that has had a
    generation), and `straggler_s` for members of the last generation that are alive and have not come. With
    `shrink_only` nobody new comes in after the first generation. With `rejoin` a restarted member takes its
    slot back in the running generation, out of sync at first; without it every loss starts the next one.
    """

    run: str = "run"
    min_size: int = 1
    max_size: int = 4096
    divisible_by: int = 1
    shrink_only: bool = False
    rejoin: bool = False
    num_lanes: int = 8
    last_call_s: float = 1.0
    recall_s: float = 60.0
    straggler_s: float = 60.0
    heartbeat_s: float = 0.5
    suspect_s: float = 2.0
    dead_s: float = 5.0
    reconnect_s: float = 0.25
    """How long a closed connection may be away before its member is dead."""
    session_s: float = 30.0
    """How long a client that is no member is remembered after its connection closed."""
    remind_s: float = 10.0
    """How often those who wait are told for whom."""
    sync_keys: str = ALWAYS
    """When answers about keys, votes and generations go out: "always" after an fdatasync, which many share;
    or "process", once they are written, which a crash of the process survives and a power cut may not."""
    sync_barriers: str = PROCESS
    """The same for barriers, whose waiters go in again after a power cut."""
    max_key_bytes: int = 1024
    max_value_bytes: int = 1 << 20
    max_keys: int = 200_000
    max_store_bytes: int = 256 << 20
    max_sessions: int = 16_384
    max_watches: int = 4096
    max_open_calls: int = 4096
    """Calls of one client that may wait at the same time."""
    max_names: int = 10_000
    """Barrier names of one generation that are remembered."""
    max_items: int = 10_000
    """Keys in one answer to a scan."""
    history: int = 4096
    """Changes of keys that are remembered for watches that reconnect."""

    def __post_init__(self) -> None:
        problems = []
        if not 1 <= self.min_size <= self.max_size:
            problems.append(f"1 <= min_size={self.min_size} <= max_size={self.max_size} does not hold")
        problems += [
            f"{name}={value!r} is neither {ALWAYS!r} nor {PROCESS!r}"
            for name, value in (("sync_keys", self.sync_keys), ("sync_barriers", self.sync_barriers))
            if value not in (ALWAYS, PROCESS)
        ]
        if self.divisible_by < 1:
            problems.append(f"divisible_by={self.divisible_by} is less than 1")
        if not 0 < self.heartbeat_s < self.suspect_s < self.dead_s:
            problems.append(
                f"0 < heartbeat_s={self.heartbeat_s:g} < suspect_s={self.suspect_s:g} < "
                f"dead_s={self.dead_s:g} does not hold"
            )
        largest = self.max_size // max(1, self.divisible_by) * self.divisible_by
        if not problems and largest < self.min_size:
            problems.append(
                f"no multiple of divisible_by={self.divisible_by} lies between min_size={self.min_size} and "
                f"max_size={self.max_size}"
            )
        if problems:
            raise UsageError("; ".join(problems), hint="correct these settings of the coordinator")
