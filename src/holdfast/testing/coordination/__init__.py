"""A simulator of whole runs around the real coordinator and the real client core.

    python -m holdfast.testing.coordination --seeds 0:1000 --jobs 2
    python -m holdfast.testing.coordination --seed 161 -v

Everything follows from one integer: how many members there are and what they do, how fast their clocks run,
when connections break and halves of them stay open, who is killed, paused or cut off, how slow the disk is
and what a crash leaves of its last write. What must hold is checked after every event, by books that are
kept apart from the coordinator's own; at the end the histories of all calls must be linearizable and nobody
may be left waiting.
"""

from holdfast.testing.coordination.simulation import Outcome, simulate
from holdfast.testing.seeds import Failure

__all__ = ["Failure", "Outcome", "simulate"]
