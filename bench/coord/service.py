"""The servers, each a process of its own: `python -m bench.coord.service NAME ADDRESS TOTAL` for the peers'.

A server of jaxlib's aborts its process when things go wrong, and its clients theirs; nothing of that may
reach the benchmark.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Protocol, Self, final

from bench.coord import peers
from bench.coord.ours import Coordinator
from bench.coord.process import await_line, ended, free_port, quiet_environment


class Service(Protocol):
    """A server that is starting; it ends with the block."""

    address: str

    def await_ready(self) -> None:
        """Return when clients can come. Fails: RuntimeError, TimeoutError."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def service(subject: str, folder: Path, total: int) -> Service:
    """A fresh server of the subject for `total` clients. `folder` is for its files."""
    if subject == "holdfast":
        return Coordinator(folder, total)
    return _Etcd(folder) if subject == "etcd" else _PythonService(subject, total)


@final
class _PythonService:
    """A peer's server inside a process of this module."""

    def __init__(self, subject: str, total: int) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.coord.service", subject, self.address, str(total)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=quiet_environment(),
            start_new_session=True,
        )

    def await_ready(self) -> None:
        await_line(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        ended(self._process)


@final
class _Etcd:
    """etcd at its defaults: one member, every put synced."""

    def __init__(self, folder: Path) -> None:
        binary = etcd_binary()
        assert binary is not None
        self.address = f"127.0.0.1:{free_port()}"
        url, peer = f"http://{self.address}", f"http://127.0.0.1:{free_port()}"
        command = [
            *(binary, "--data-dir", str(folder / "etcd"), "--log-level", "error"),
            *("--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", peer),
            *("--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"),
        ]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)

    def await_ready(self) -> None:
        peers.await_etcd(self.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        ended(self._process)


def etcd_binary() -> str | None:
    """Where etcd is: on the path, or where `make bench` unpacked it."""
    unpacked = Path(sys.prefix, "etcd", "usr", "bin", "etcd")
    return shutil.which("etcd") or (str(unpacked) if unpacked.is_file() else None)


def etcd_version() -> str | None:
    """`3.4.23`, or None where there is no etcd."""
    binary = etcd_binary()
    if binary is None:
        return None
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    return said.partition("etcd Version:")[2].split()[0]


def main() -> None:
    """Serve until the input ends."""
    name, address, total = sys.argv[1:]
    serve = {"jaxlib": peers.serve_jaxlib, "tcpstore": peers.serve_tcpstore}[name]
    kept = serve(address, int(total))
    print("ready", flush=True)
    sys.stdin.read()
    del kept
    os._exit(0)


if __name__ == "__main__":
    main()
