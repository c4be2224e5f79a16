"""The nodes of a launched run: their processes, what their vaults hold, and their loss."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, final

from holdfast.checkpoint import committed_steps
from holdfast.errors import HoldfastError
from holdfast.storage import opened
from holdfast.supervise.agent_config import vault_socket
from holdfast.supervise.processes import Process, marked, wait_all
from holdfast.supervise.secret import run_token
from holdfast.transfer import Endpoint
from holdfast.vault.catalogue import CATALOGUE, ENTRIES, Held, decode_catalogue
from tests.vault.nodes import await_that

WAIT_S: Final = 30.0
_ASK_S: Final = 5.0


@final
class Nodes:
    """All nodes of the run in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def root(self, node: int) -> Path:
        return self._folder / "nodes" / str(node)

    # ---- vaults

    def held(self, node: int) -> tuple[Held, ...]:
        """What the vault of a node holds; nothing where it does not answer."""
        path = Path(f"{vault_socket(str(self.root(node)))}.address")
        token = run_token(self._folder).encode()
        with suppress(OSError, HoldfastError), Endpoint(run=self._folder.name, token=token) as endpoint:
            plan = endpoint.prepare(path.read_text().strip(), CATALOGUE, timeout_s=_ASK_S)
            return decode_catalogue(str(plan.run(deadline_s=_ASK_S).result().tree[ENTRIES]))
        return ()

    def copies(self, node: int, origin: int) -> list[int]:
        """The steps of another node that the vault of `node` holds."""
        return [one.step for one in self.held(node) if one.origin == str(origin)]

    def await_copy(self, node: int, origin: int, step: int) -> None:
        missing = f"node {node} never had just step {step} of node {origin}"
        await_that(lambda: self.copies(node, origin) == [step], missing)

    def neighbours(self, node: int) -> set[int]:
        """The nodes whose states the vault of `node` is to copy."""
        with suppress(FileNotFoundError):
            lines = (self.root(node) / "neighbours").read_text().splitlines()
            return {int(line.partition("=")[0]) for line in lines}
        return set()

    def on_disk(self) -> list[int]:
        """The steps that a run whose memory is lost could go on from."""
        folder = self._folder / "ckpt"
        return sorted(committed_steps(opened(str(folder)))) if folder.exists() else []

    # ---- processes

    def agent(self, node: int) -> int:
        """The process of the agent."""
        found = marked({"HOLDFAST_AGENT": f"{self._folder}:{node}"})
        (pid,) = [pid for pid, _ in found if not _is_part(pid)]
        return pid

    def lose(self, node: int) -> None:
        """Everything on the node dies: agent, workers, vault, coordinator. Returns when it is gone."""
        pids = [pid for pid, _ in marked({"HOLDFAST_FOLDER": str(self._folder), "HOLDFAST_NODE": str(node)})]
        lost = []
        # The agent first: it would start again what it sees dying.
        for pid in [self.agent(node), *pids]:
            with suppress(OSError):
                lost.append(Process(pid))
        for process in lost:
            process.signal(signal.SIGKILL)
        wait_all(lost, WAIT_S)
        for process in lost:
            process.close()

    @contextmanager
    def lost_for_good(self, node: int) -> Iterator[None]:
        """The node is lost, and no other agent gets a hold of it meanwhile."""
        fd = os.open(self.root(node) / "agent.lock", os.O_RDWR)
        # Whoever waits for a lock has it before those who try later.
        waiter = threading.Thread(target=lambda: fcntl.flock(fd, fcntl.LOCK_EX), daemon=True)
        waiter.start()
        try:
            self.lose(node)
            waiter.join(WAIT_S)
            assert not waiter.is_alive(), "somebody else holds the node's lease"
            yield
        finally:
            os.close(fd)


def _is_part(pid: int) -> bool:
    try:
        return b"\0HOLDFAST_PART=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return True
