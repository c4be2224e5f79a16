"""Holdfast's coordinator as a process, and its clients."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self, final

from bench.coord.crowds import DEADLINE_S, VALUE, LoopCrowd, ThreadCrowd
from bench.coord.process import await_line, ended, free_port

RUN = "bench"
_TOKEN = "HOLDFAST_BENCH_TOKEN_FILE"


@final
class Coordinator:
    """`python -m holdfast.coord` at its defaults (answers after their records, keys synced), with a token."""

    def __init__(self, folder: Path, total: int) -> None:
        self.address = f"tcp://127.0.0.1:{free_port()}"
        token = folder / "token"
        token.write_text(os.urandom(32).hex())
        os.environ[_TOKEN] = str(token)  # the client processes inherit it
        self._command = [
            *(sys.executable, "-m", "holdfast.coord", "--folder", str(folder / "state"), "--run", RUN),
            *("--bind", self.address, "--token-file", str(token)),
            *("--min-size", str(total), "--max-size", str(total)),
        ]
        self._process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdout=subprocess.PIPE, start_new_session=True)

    def restart_killed(self) -> None:
        """SIGKILL it, wait until it is gone, and start it again in the same folder at the same address."""
        self._process.kill()
        ended(self._process)
        self._process = self._started()

    def await_ready(self) -> None:
        """Return when clients can come: then it says where it is. Fails: RuntimeError."""
        await_line(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        ended(self._process)


def _token() -> bytes:
    return Path(os.environ[_TOKEN]).read_bytes()


class OneClient(ThreadCrowd):
    """The blocking face."""

    def __init__(self, address: str, slots: Sequence[int], total: int) -> None:
        super().__init__(address, slots, total)
        from holdfast.coord.client import CoordClient

        self._made = CoordClient
        self._clients: dict[int, CoordClient] = {}
        self._secret = _token()

    def _enter(self, place: int) -> None:
        slot = self._slots[place]
        client = self._clients[place] = self._made(
            self._address, run=RUN, token=self._secret, name=f"client-{slot}", connect_timeout_s=DEADLINE_S
        )
        client.join(slot=slot, timeout_s=DEADLINE_S)

    def _meet(self, place: int) -> None:
        self._clients[place].barrier("bench", timeout_s=DEADLINE_S)

    def _set(self, place: int) -> None:
        self._clients[place].set(f"bench/{self._slots[place]}", VALUE, timeout_s=DEADLINE_S)

    def _get(self, place: int) -> None:
        self._clients[place].get(f"bench/{self._slots[place]}", timeout_s=DEADLINE_S)

    def _leave(self, place: int) -> None:
        self._clients[place].close()


class ManyClients(LoopCrowd):
    """The asyncio face."""

    def __init__(self, address: str, slots: Sequence[int], total: int) -> None:
        super().__init__(address, slots, total)
        from holdfast.coord.aio import AsyncCoordClient

        self._made = AsyncCoordClient
        self._clients: dict[int, AsyncCoordClient] = {}
        self._secret = _token()

    async def _enter(self, place: int) -> None:
        slot = self._slots[place]
        client = self._clients[place] = self._made(
            self._address, run=RUN, token=self._secret, name=f"client-{slot}", connect_timeout_s=DEADLINE_S
        )
        await client.join(slot=slot, timeout_s=DEADLINE_S)

    async def _meet(self, place: int) -> None:
        await self._clients[place].barrier("bench", timeout_s=DEADLINE_S)

    async def _set(self, place: int) -> None:
        await self._clients[place].set(f"bench/{self._slots[place]}", VALUE, timeout_s=DEADLINE_S)

    async def _get(self, place: int) -> None:
        await self._clients[place].get(f"bench/{self._slots[place]}", timeout_s=DEADLINE_S)

    async def _leave(self, place: int) -> None:
        await self._clients[place].close()
