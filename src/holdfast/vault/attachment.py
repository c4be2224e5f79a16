"""Reaching a standing vault at its Unix socket."""

from __future__ import annotations

import socket
import time
from typing import Final

from holdfast.clock import Deadline
from holdfast.errors import VaultError
from holdfast.vault.messages import REPLIES, Bye, CopyFrom, Noted, Refused, Reply
from holdfast.wire import FrameSocket

_CONNECT_S: Final = 30.0
_POLL_S: Final = 0.02
REATTACH_S: Final = 4.0
"""How long a trainer waits for a standing vault that was killed: whoever watches it starts another."""


def attached(path: str, *, wait_s: float = 0.0) -> socket.socket:
    """A connection to the vault at `path`.

    Blocks: up to `wait_s` for one to be there. Fails: VaultError.
    """
    deadline = Deadline(wait_s)
    while True:
        try:
            return _connected(path)
        except OSError as error:
            if deadline.expired():
                raise VaultError(
                    f"no vault answers at {path}: {error.strerror or error}",
                    hint="start one with `python -m holdfast.vault --listen PATH`",
                ) from error
            # The kernel tells nobody that somebody listens at a path.
            time.sleep(_POLL_S)


def _connected(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(_CONNECT_S)
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock


def copy_from(path: str, node: str, address: str, *, timeout_s: float = 10.0) -> None:
    """Have the vault at `path` keep copies of what the vault of `node`, at `address`, stages.

    `address` may be `file:PATH`, the file where that vault says it; empty ends the copying. Blocks: until the
    vault has heard it. Fails: VaultError, ConnectionLost, DeadlineError.
    """
    frames: FrameSocket[Reply] = FrameSocket(attached(path), REPLIES)
    try:
        frames.send(CopyFrom(node, address))
        reply, _ = frames.receive(timeout_s=timeout_s)
        if not isinstance(reply, Noted):
            message = reply.message if isinstance(reply, Refused) else repr(reply)
            raise VaultError(f"the vault at {path} keeps no copies of {node}: {message}")
        frames.send(Bye())
    finally:
        frames.close()
