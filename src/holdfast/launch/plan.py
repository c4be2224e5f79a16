"""What a launch is made of, wherever its nodes come from: settings of policy, agents and coordinator.

A launcher (this machine, and one file for each cluster) starts agents with these configs and gives the
conductor their streams; everything else is the same everywhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from holdfast.errors import UsageError
from holdfast.supervise.agent_config import AgentConfig, vault_socket
from holdfast.supervise.rules import PolicySettings
from holdfast.supervise.watch import Deadlines

JOURNAL: Final = "journal.jsonl"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_OURS: Final = (
    "CONTROL_FD",
    "BOARD_FD",
    "TOKEN_FD",
    "FOLDER",
    "NODE",
    "PART",
    "DIGEST",
    "VAULT",
    "VAULTS",
    "COORD",
    "RUN",
    "LAUNCH",
)
"""Variables that say what a process is; a launch from within a worker does not pass its own on."""
_WIRE: Final = ("bfloat16", "float16", "float32")
"""What floats may be rounded to for a sum. Those of 8 bits and less hold none that is of use."""
_FIRST_CALL_S: Final = 30.0
"""How long a first generation waits for all to come."""
_SHORT_CALL_S: Final = 2.0
"""The same where the run may grow: then there is always somebody who could still come."""
_RECALL_S: Final = 0.25
"""The same once the run has trained: after a loss of all, whoever is ready first goes on, alone if need be.
The others come into the next generation, as they would after any loss."""
_SESSION_S: Final = 10.0
"""How long agents and vaults that were killed are remembered: a run ends after those it knows of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """A run, as a user asks for it."""

    script: tuple[str, ...]
    """The training script and its arguments."""
    run: str = "run"
    folder: str = "runs"
    """Where the folders of runs lie."""
    replicas: int = 1
    workers_per_replica: int = 1
    min_replicas: int = 1
    max_replicas: int = 0
    parked: int = 0
    nodes: int = 1
    domains: tuple[str, ...] = ()
    """For each node what it fails together with, a rack or a power line; empty: each is one of its own."""
    spares: int = 0
    lanes: int = 8
    wire_dtype: str | None = None
    """What floats are rounded to for the sum of a step, by all workers; None: they are summed as they are."""
    nproc: int = 0
    log_slots: frozenset[int] | None = frozenset({0})
    vault: bool = True
    deadlines: Deadlines = field(default_factory=Deadlines)
    orphan_s: float = 30.0
    agent_dead_s: float = 5.0
    grace_s: float = 60.0
    flush_s: float = 60.0
    notice_s: float = 30.0
    policy: Mapping[str, Any] = field(default_factory=dict)
    """More settings of the policy, by name."""
    coordinator: Mapping[str, Any] = field(default_factory=dict)
    """More settings of the coordinator, by name."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.run):
            raise UsageError(f"{self.run!r} is no name of a run", hint="letters, digits and . _ - are fine")
        if not self.script:
            raise UsageError("no training script was given", hint="holdfast launch [options] train.py [args]")
        if not os.path.isfile(self.script[0]):
            raise _no_script(*self.script)
        if self.lanes < 1:
            raise UsageError(f"lanes={self.lanes} is less than 1", hint="a step has one lane at least")
        check_wire_dtype(self.wire_dtype)
        if self.domains and len(self.domains) != self.nodes:
            raise UsageError(
                f"there are {len(self.domains)} domains ({', '.join(self.domains)}) for {self.nodes} nodes",
                hint="name one for each node, in order: --domains rack1,rack1,rack2,rack2",
            )
        if self.nproc < 0:
            raise UsageError(f"nproc={self.nproc} is less than 0", hint="0 stands for all cores")
        try:
            str(self.path).encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the folder {str(self.path)!r} of the run has a name that is not UTF-8",
                hint="journal and status could not name it; give another one with --folder",
            ) from error

    @property
    def path(self) -> Path:
        """The run's own folder."""
        return Path(self.folder).absolute() / self.run

    @property
    def journal(self) -> Path:
        """The run's journal."""
        return self.path / JOURNAL


def check_wire_dtype(name: str | None) -> None:
    """Refuse a dtype that sums are not made in; None is fine. Fails: UsageError."""
    if name is not None and name not in _WIRE:
        raise UsageError(f"--wire-dtype {name}: no sums are made in that", hint=f"use {', '.join(_WIRE)}")


def _no_script(given: str, *arguments: str) -> UsageError:
    if os.path.isdir(given):
        return UsageError(f"{given} is a folder, not a script", hint="give the path of the script in it")
    if re.fullmatch(r"python[0-9.]*", os.path.basename(given)):
        script = next((one for one in arguments if not one.startswith("-")), "train.py")
        return UsageError(f"there is no script {given}", hint=f"leave it out: holdfast launch {script}")
    return UsageError(f"there is no script {given}", hint="give its path; options of launch come before it")


def policy_settings(settings: LaunchSettings) -> PolicySettings:
    """The rules of the run. Fails: UsageError."""
    given: dict[str, Any] = {
        "run": settings.run,
        "replicas": settings.replicas,
        "workers_per_replica": settings.workers_per_replica,
        "min_replicas": settings.min_replicas,
        "max_replicas": settings.max_replicas,
        "nodes": settings.nodes,
        "spares": settings.spares,
        "parked": settings.parked,
        "vaults": settings.vault,
        "domains": settings.domains,
        "wire_dtype": settings.wire_dtype,
        "agent_dead_s": settings.agent_dead_s,
        "grace_s": settings.grace_s,
        # Vaults may take all of their time, and the coordinator ends after them.
        "end_s": settings.flush_s + 20.0,
    }
    return PolicySettings(**{**given, **settings.policy})


def agent_config(settings: LaunchSettings, node: int, token: str, launch: str = "") -> AgentConfig:
    """What the agent of `node` is told, in the launch of this name."""
    workers = settings.workers_per_replica
    most = max(settings.replicas, settings.max_replicas)
    coordinator = {
        "min_size": settings.min_replicas * workers,
        "max_size": most * workers,
        "divisible_by": workers,
        "num_lanes": settings.lanes,
        "session_s": _SESSION_S,
        # Whoever hangs is found and ended by its agent; all others are busy, and are waited for.
        "straggler_s": settings.deadlines.longest_s,
        "last_call_s": _FIRST_CALL_S if most == settings.replicas else _SHORT_CALL_S,
        "recall_s": _RECALL_S,
    }
    slots = settings.log_slots
    return AgentConfig(
        run=settings.run,
        launch=launch,
        node=node,
        folder=str(settings.path),
        root=node_root(settings, node),
        script=settings.script,
        token=token,
        cwd=os.getcwd(),
        env=_environment(settings),
        journal=str(settings.journal),
        replicas=settings.replicas,
        workers_per_replica=workers,
        lanes=settings.lanes,
        wire_dtype=settings.wire_dtype,
        nodes=settings.nodes,
        nproc=settings.nproc,
        hosts_coordinator=node == 0,
        coordinator={**coordinator, **settings.coordinator},
        vault=settings.vault,
        vaults=_other_vaults(settings, node),
        log_slots=None if slots is None else tuple(sorted(slots)),
        deadlines=settings.deadlines,
        orphan_s=settings.orphan_s,
        grace_s=settings.grace_s,
        flush_s=settings.flush_s,
        notice_s=settings.notice_s,
    )


def node_root(settings: LaunchSettings, node: int) -> str:
    """The folder that belongs to one node."""
    return str(settings.path / "nodes" / str(node))


def _other_vaults(settings: LaunchSettings, node: int) -> tuple[tuple[int, str], ...]:
    """The other nodes, and where their vaults say their addresses."""
    if not settings.vault:
        return ()
    others = [number for number in range(settings.nodes) if number != node]
    return tuple((one, f"file:{vault_socket(node_root(settings, one))}.address") for one in others)


def _environment(settings: LaunchSettings) -> dict[str, str]:
    ours = {f"HOLDFAST_{name}" for name in _OURS}
    return {name: value for name, value in settings.environment.items() if name not in ours}
