"""Stand-ins for nodes: a standing vault each, with its own folder, and what tests look at in it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from holdfast.errors import HoldfastError
from holdfast.transfer import Endpoint
from holdfast.vault import restore_newest
from holdfast.vault.catalogue import CATALOGUE, ENTRIES, Held, decode_catalogue
from tests.checkpoint.children import TIMEOUT_S, Child, Children
from tests.vault.trainer import RUN, TOKEN


def await_that(holds: Callable[[], object], what: str = "") -> None:
    """Wait until something that no event tells of has happened in another process."""
    ends = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < ends, what or "it did not happen"
        time.sleep(0.005)


def entries_at(address: str, run: str = RUN) -> tuple[Held, ...]:
    """The catalogue of the vault that offers its states at `address`."""
    with Endpoint(run=run, token=TOKEN) as endpoint:
        plan = endpoint.prepare(address, CATALOGUE, timeout_s=10)
        return decode_catalogue(plan.run(deadline_s=10).result().tree[ENTRIES])


def await_offered(address: str, step: int, run: str = RUN) -> None:
    """Wait until a vault offers a step; a small one may be durable before that."""
    await_that(lambda: step in [one.step for one in entries_at(address, run)], f"step {step} is not offered")


@final
class Node:
    """A node with a standing vault that serves from the start."""

    def __init__(self, children: Children, folder: Path, name: str) -> None:
        self.name = name
        self.folder = folder / name
        self.folder.mkdir()
        self.path = str(self.folder / "vault.sock")
        self.lease = str(self.folder / "lease")
        self._children = children
        self._token = self.folder / "token"
        self._token.write_bytes(TOKEN)
        self.vault: Child | None = None

    def start(self, *options: object, **env: str) -> Child:
        """Start the vault, or another one in its place; returns when it can be asked."""
        where = ("--serve", "127.0.0.1:0", "--run", RUN, "--token-file", self._token)
        vault = self._children.python("-m", "holdfast.vault", "--listen", self.path, *where, *options, **env)
        self.vault = vault

        def there() -> bool:
            assert vault.process.poll() is None, vault.errors()
            return os.path.exists(self.path) and bool(self.entries_or_none() is not None)

        await_that(there, "the vault does not answer")
        return vault

    def train(self, root: Path, *options: object, **env: str) -> Child:
        return self._children.python("-m", "tests.vault.trainer", root, self.path, *options, **env)

    @property
    def pid(self) -> int:
        assert self.vault is not None
        return self.vault.pid

    @property
    def address(self) -> str:
        return Path(f"{self.path}.address").read_text().strip()

    def entries(self) -> tuple[Held, ...]:
        """The catalogue of the vault."""
        return entries_at(self.address)

    def entries_or_none(self) -> tuple[Held, ...] | None:
        try:
            return self.entries()
        except (OSError, HoldfastError):
            return None

    def await_steps(self, *steps: int, origin: str = "") -> None:
        """Wait until the vault lists exactly these steps of an origin, verified."""

        def listed() -> bool:
            entries = self.entries()
            mine = [one.step for one in entries if one.origin == origin]
            return sorted(mine) == sorted(steps) and all(one.settled for one in entries)

        await_that(listed, f"the vault of {self.name} never held just {steps}: {self.entries()}")

    def slots(self) -> set[int]:
        """The inodes of the memory that the vault holds."""
        found = set()
        for fd in os.listdir(f"/proc/{self.pid}/fd"):
            path = f"/proc/{self.pid}/fd/{fd}"
            try:
                if "memfd:holdfast-slot" in os.readlink(path):
                    found.add(os.stat(path).st_ino)
            except OSError:
                continue
        return found

    def damage(self, step: int, size: int) -> None:
        """Flip a bit in the vault's memory, in the slot that holds `step`."""
        from tests.vault.trainer import state

        wanted = state(step, size)["w"].tobytes()[:4096]
        for fd in os.listdir(f"/proc/{self.pid}/fd"):
            path = f"/proc/{self.pid}/fd/{fd}"
            try:
                if "memfd:holdfast-slot" not in os.readlink(path):
                    continue
            except OSError:
                continue
            with open(path, "r+b") as file:
                at = file.read().find(wanted)
                if at >= 0:
                    file.seek(at + 12)
                    (byte,) = file.read(1)
                    file.seek(at + 12)
                    file.write(bytes([byte ^ 1]))
                    return
        raise AssertionError(f"no slot holds step {step}")

    def gone(self) -> bool:
        """Whether the vault left nothing behind."""
        return not os.path.exists(self.path) and not os.path.exists(f"{self.path}.address")


@final
class Agent:
    """Holds a node's lease, as its agent does."""

    def __init__(self, node: Node) -> None:
        self._fd = os.open(node.lease, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def die(self) -> None:
        os.close(self._fd)


def newest(*addresses: str, into: Any = None, **options: Any) -> tuple[int, Any] | None:
    return restore_newest(addresses, into, token=TOKEN, run=RUN, **options)
