"""A simulator of whole supervised runs around the real policy and the real coordinator.

    python -m holdfast.testing.supervision --seeds 0:1000 --jobs 2
    python -m holdfast.testing.supervision --seed 161 -v

Everything follows from one integer: how many nodes, replicas and parked processes there are, how long things
take, which workers crash, hang or are stopped and when, which agents die or stand still, which nodes are
lost, return or get their notice, when the coordinator is killed and when the conductor itself is late. What
must hold is checked by an account of its own: nobody shares a seat, budgets and waits are kept, the run ends
as it should, in time, and nothing is left behind.
"""

from holdfast.testing.seeds import Failure
from holdfast.testing.supervision.simulation import Outcome, simulate

__all__ = ["Failure", "Outcome", "simulate"]
