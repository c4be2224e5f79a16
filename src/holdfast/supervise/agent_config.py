"""What an agent is told at its start, over an inherited descriptor: nobody else can read it there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Collection
from typing import Any, Final

import msgspec

from holdfast.errors import UsageError
from holdfast.supervise.watch import Deadlines

_MAX_CONFIG: Final = 4 << 20
_MAX_SOCKET_PATH: Final = 95
"""Names of Unix sockets have 107 bytes at most; others put `.address` and the like behind this one."""


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One agent's part of a run. Paths are absolute."""

    run: str
    launch: str = ""
    """What tells this launch of the run from all others."""
    node: int
    folder: str
    """The run's folder, which all nodes see."""
    root: str
    """The node's own folder."""
    script: tuple[str, ...]
    """The training script and its arguments."""
    program: tuple[str, ...] = ()
    """What runs the script, where it is not `python -m holdfast.supervise.worker`."""
    token: str
    cwd: str
    env: dict[str, str]
    """What the workers' environment is made from."""
    journal: str
    replicas: int = 1
    workers_per_replica: int = 1
    lanes: int = 8
    wire_dtype: str | None = None
    nodes: int = 1
    nproc: int = 0
    """Threads of each worker, pinned for equal bits everywhere; 0: what the machine has."""
    hosts_coordinator: bool = False
    coordinator: dict[str, Any] = {}
    """Settings of the coordinator by name."""
    bind: str = "tcp://127.0.0.1:0"
    vault: bool = True
    vault_serve: str = "127.0.0.1:0"
    """Where the vault offers its states."""
    vaults: tuple[tuple[int, str], ...] = ()
    """The other nodes, and where their vaults are: each an address, or `file:` and the file that says it."""
    log_slots: tuple[int, ...] | None = (0,)
    """Whose output is shown; None: everybody's."""
    deadlines: Deadlines = Deadlines()
    beat_s: float = 0.5
    tick_s: float = 0.1
    orphan_s: float = 30.0
    lease_s: float = 50.0
    """How long to wait for the agent of an earlier launch, which may be ending."""
    grace_s: float = 30.0
    """What workers get to save and go when the launch process is gone."""
    notice_s: float = 30.0
    """How long after SIGTERM the node is still there."""
    flush_s: float = 60.0
    """What the vault gets to make durable what is staged."""
    fenced_s: float = 2.0
    """What a worker gets to end by itself once the coordinator has declared it dead."""
    nice: int = 10
    """Niceness of processes that warm up while others train."""

    @property
    def discovery(self) -> str:
        """The file that says where the coordinator is."""
        return os.path.join(self.folder, "coord", "address")

    @property
    def lease(self) -> str:
        """The file that a living agent holds locked."""
        return os.path.join(self.root, "agent.lock")

    @property
    def vault_socket(self) -> str:
        """The vault's Unix socket; elsewhere than in the node's folder where that name would be too long."""
        return vault_socket(self.root)

    @property
    def neighbourhood(self) -> str:
        """The file that tells the vault whose states to keep copies of."""
        return os.path.join(self.root, "neighbours")

    @property
    def marks(self) -> dict[str, str]:
        """What every process of this node has in its environment."""
        return {"HOLDFAST_FOLDER": self.folder, "HOLDFAST_NODE": str(self.node)}


def vault_socket(root: str) -> str:
    """The name of the socket of the vault whose node has its folder at `root`."""
    path = os.path.join(root, "vault.sock")
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
        return path
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    return os.path.join(tempfile.gettempdir(), f"holdfast-{os.getuid()}-{digest}.sock")


def forget_vault(root: str) -> None:
    """Remove what a vault that was killed left of its socket, which may lie elsewhere than in `root`."""
    for name in (vault_socket(root), f"{vault_socket(root)}.address"):
        with contextlib.suppress(OSError):
            os.unlink(name)


def name_neighbours(config: AgentConfig, nodes: Collection[int]) -> None:
    """Have the node's vault keep copies of the states of these nodes, and of no others. Fails: OSError."""
    temporary = f"{config.neighbourhood}.tmp"
    with open(temporary, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.writelines(f"{node}={address}\n" for node, address in config.vaults if node in nodes)
    os.replace(temporary, config.neighbourhood)


def write_config(config: AgentConfig) -> int:
    """A descriptor from which the agent reads its config once."""
    fd = os.memfd_create("holdfast-config", os.MFD_CLOEXEC)
    # Not by msgspec: arguments and variables are bytes to the system, and what is not UTF-8 in them are
    # lone surrogates to Python, which only this writes and reads.
    data = memoryview(json.dumps(msgspec.to_builtins(config)).encode("ascii"))
    while data:
        data = data[os.write(fd, data) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def read_config(fd: int) -> AgentConfig:
    """The config behind an inherited descriptor, which is closed. Fails: UsageError."""
    with os.fdopen(fd, "rb") as file:
        data = file.read(_MAX_CONFIG + 1)
    try:
        return msgspec.convert(json.loads(data[:_MAX_CONFIG]), type=AgentConfig)
    except (msgspec.MsgspecError, ValueError) as error:
        raise UsageError(
            f"what --config-fd gives is no config of an agent: {error}", hint="start it with holdfast launch"
        ) from error
