"""A real coordinator process that a test can kill and start again."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self, final

TIMEOUT_S = 30.0


@final
class CoordinatorProcess:
    """Serves the log in `folder`. `address` stays the same through restarts."""

    def __init__(self, folder: Path, *options: str, token: bytes | None = None) -> None:
        self._folder = folder
        self._options = options
        self._token = token
        self.address = f"file:{folder}/address"
        self.process: subprocess.Popen[bytes]
        folder.mkdir(exist_ok=True)
        self.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self) -> None:
        """Start it; returns when clients can come."""
        command = [sys.executable, "-m", "holdfast.coord", "--folder", str(self._folder / "log")]
        command += ["--bind", f"unix:{self._folder}/coord.sock", "--bind", "tcp://127.0.0.1:0"]
        command += ["--discovery", str(self._folder / "address"), *self._options]
        inherited: tuple[int, ...] = ()
        if self._token is not None:
            ours, theirs = os.pipe()
            os.write(theirs, self._token)
            os.close(theirs)
            command += ["--token-fd", str(ours)]
            inherited = (ours,)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=inherited)
        for fd in inherited:
            os.close(fd)
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], TIMEOUT_S)[0], "the coordinator did not start"
        line = self.process.stdout.readline()
        assert json.loads(line)["pid"] == self.process.pid

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End it and wait for that."""
        self.process.send_signal(number)
        self.process.wait(TIMEOUT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.kill(signal.SIGTERM)
