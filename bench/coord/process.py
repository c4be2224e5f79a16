"""Processes of the benchmark: their environment, their ports, their end."""

from __future__ import annotations

import os
import socket
import subprocess

_GRACE_S = 10.0


def free_port() -> int:
    """A port of the loopback that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def quiet_environment() -> dict[str, str]:
    """The environment, with jaxlib's and torch's chatter turned off.

    TCPStore asks the resolver for the name of every peer, 127.0.0.1 included; where no resolver answers, that
    must not take half a minute for 256 clients. It is outside every measurement.
    """
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return {**os.environ, **quiet, "RES_OPTIONS": "timeout:1 attempts:1"}


def ended(process: subprocess.Popen[bytes]) -> None:
    """Close the process's input and wait until it is gone; kill it if it does not go."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def await_line(process: subprocess.Popen[bytes]) -> bytes:
    """The next line that a process writes. Fails: RuntimeError if it ended instead."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} ended with exit code {process.wait()}")
    return line
