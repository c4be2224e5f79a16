"""Sums of lanes between replicas: a fixed tree, one adder, deadlines, any membership.

Every member folds its own lanes (`tree`, `folding`), and in an exchange the members' sums become the total at
every one of them (`exchange`). All additions are those of one fixed binary tree over the lane numbers, made
by one adder (`adder`) on the same blocks of memory (`layout`), so the bits do not depend on who computed
what, on how many there are, or on what failed meanwhile.

States of a member in a step:

    begun ──▶ folding ──▶ announced ──▶ published ──▶ decided
                 ▲            │              │
                 └── regroup + reassign ◀────┘     a member was lost: what is folded stays

What can happen, and what comes of it:

    a link breaks, something from there is missing   ReplicaLostError at once
    a member is silent                               ReplicaLateError at the caller's deadline
    a member dies after its share was published      whoever heard of it completes the step; others `fetch`
    a member goes on in another generation           what was read of it is void: no sum is made of it,
                                                     and the wait goes on until the check raises
    a message of another generation or step          is never looked up
    another run, token or life of a member           is turned away in the handshake
    damaged bytes                                    end the link they came on
    other arrays, or another deal of lanes           MismatchError or ReduceError that names them

One thread serves the links (`hub`, `links`). Small lanes are folded in the call that adds them, large ones by
a few threads (`intake`, `workers`) while the caller computes the next. In an exchange the caller's thread
adds. `planning` says before a run what all of it will cost.
"""

from holdfast.reduce.hub import Member
from holdfast.reduce.planning import SumSettings, sum_plan
from holdfast.reduce.reducer import Group, Reducer

__all__ = ["Group", "Member", "Reducer", "SumSettings", "sum_plan"]
