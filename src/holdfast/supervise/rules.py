"""What an operator can set about supervision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from holdfast.errors import UsageError
from holdfast.supervise.budgets import Allowance
from holdfast.supervise.messages import (
    AGENT_LOST,
    CRASHED,
    FENCED,
    HUNG,
    KILLED,
    OUT_OF_MEMORY,
    PREEMPTED,
    STALLED,
    STOPPED,
)

PARKING: Final = "parking"
"""The budget of processes that end before anybody needs them."""
PART: Final = "part lost"

_HANG: Final = Allowance(limit=6)
ALLOWANCES: Final[Mapping[str, Allowance]] = MappingProxyType(
    {
        CRASHED: Allowance(limit=10),
        HUNG: _HANG,
        STOPPED: _HANG,
        STALLED: _HANG,
        FENCED: Allowance(limit=10),
        OUT_OF_MEMORY: Allowance(limit=4),
        AGENT_LOST: Allowance(limit=6),
        PART: Allowance(limit=20, window_s=600.0),
        PARKING: Allowance(limit=5),
        # No failures, however many; but nobody is started in a tight circle.
        PREEMPTED: Allowance(limit=0, longest_s=10.0),
        KILLED: Allowance(limit=0, longest_s=10.0),
    }
)
"""How often what may happen without progress: to one replica, one node or one part."""

FREE: Final = (PREEMPTED, KILLED)
"""Causes that are nobody's failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """The rules of one run. Times in seconds.

    `replicas` times `workers_per_replica` seats on `nodes` nodes, of which the last `spares` are kept free
    until they are needed; a node has room for `seats_per_node` workers (0: any number) and holds `parked`
    warm processes beside them. The run goes on with `min_replicas`, and can grow to `max_replicas` on wish.
    """

    run: str = "run"
    replicas: int = 1
    workers_per_replica: int = 1
    min_replicas: int = 1
    max_replicas: int = 0
    """0: as many as `replicas`."""
    nodes: int = 1
    spares: int = 0
    seats_per_node: int = 0
    parked: int = 0
    vaults: bool = False
    """Whether nodes have vaults, which can keep copies of each other's states."""
    domains: tuple[str, ...] = ()
    """For each node what it fails together with; a node without one is a domain of its own."""
    wire_dtype: str | None = None
    """What workers round floats to for their sums: for the status, nothing is decided by it."""
    coordinator_node: int = 0
    """Without this node there is no coordinator, and so no run."""
    allowances: Mapping[str, Allowance] = field(default_factory=dict)
    """Instead of those in ALLOWANCES, by cause."""
    progress_steps: int = 3
    """So many steps beyond what the run had reached are progress: they give budgets back."""
    poison_failures: int = 3
    stillborn_failures: int = 3
    """So many failures of one replica, alike, in a run that has never come to a step, are the program's."""
    lemon_blames: int = 4
    lemon_window_s: float = 3600.0
    agent_dead_s: float = 5.0
    agent_start_s: float = 60.0
    kill_s: float = 10.0
    """An agent that has not ended or started a process by then does not work."""
    spawn_s: float = 60.0
    drain_s: float = 120.0
    node_retry_s: float = 30.0
    """How often a node that is away is tried again."""
    wait_s: float = 900.0
    """How long a run waits for room for `min_replicas` before it stops."""
    finish_s: float = 600.0
    """How long the others may take to finish once a whole replica has."""
    grace_s: float = 60.0
    end_s: float = 20.0
    """What agents may need beyond the workers' grace to end everything."""

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value} is less than {least}"
            for name, value, least in (
                ("replicas", self.replicas, 1),
                ("min_replicas", self.min_replicas, 1),
                ("workers_per_replica", self.workers_per_replica, 1),
                ("nodes", self.nodes, 1),
                ("spares", self.spares, 0),
                ("seats_per_node", self.seats_per_node, 0),
                ("parked", self.parked, 0),
                ("poison_failures", self.poison_failures, 1),
                ("stillborn_failures", self.stillborn_failures, 1),
                ("lemon_blames", self.lemon_blames, 1),
                ("progress_steps", self.progress_steps, 1),
            )
            if value < least
        ]
        if self.min_replicas > max(1, self.replicas):
            problems.append(f"min_replicas={self.min_replicas} is more than replicas={self.replicas}")
        if self.most < self.replicas:
            problems.append(f"max_replicas={self.most} is less than replicas={self.replicas}")
        if self.spares >= self.nodes:
            problems.append(f"spares={self.spares} leaves none of nodes={self.nodes} to work")
        if not 0 <= self.coordinator_node < self.nodes:
            problems.append(f"there is no node coordinator_node={self.coordinator_node}")
        unknown = sorted(set(self.allowances) - set(ALLOWANCES))
        if unknown:
            problems.append(f"no such cause: {', '.join(unknown)}")
        room = self.seats_per_node * self.nodes
        if self.seats_per_node and room < self.min_replicas * self.workers_per_replica:
            problems.append(f"{room} seats on all nodes are too few for min_replicas={self.min_replicas}")
        if problems:
            raise UsageError("; ".join(problems), hint="correct these settings of the run")

    @property
    def most(self) -> int:
        return self.max_replicas or self.replicas

    def allowance(self, cause: str) -> Allowance:
        return self.allowances.get(cause) or ALLOWANCES.get(cause) or ALLOWANCES[CRASHED]
