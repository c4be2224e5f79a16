"""Bytes that pass through a socket and are hashed on the way, without the interpreter."""

from __future__ import annotations

import os
import socket
from typing import Final, final

import numpy as np

from holdfast.arrays import copying
from holdfast.arrays.copying import Numbers, address_of
from holdfast.arrays.scattering import scatters

_LINE: Final = 64


def passes(nbytes: int) -> bool:
    """Whether bodies of that size can pass here: not without the library, nor if they are very short."""
    return scatters(nbytes)


@final
class Passage:
    """A head, a body and its xxh3_128, on their way through a blocking socket.

    `views` has the address and the size of each stretch of them, in their order; the memory must outlive it.
    The last has 16 bytes: for a sender they are filled in.
    """

    def __init__(self, views: Numbers, *, head: int, tail: int) -> None:
        assert copying.library is not None
        self._library = copying.library
        self._views = np.ascontiguousarray(views, np.uint64)  # address and size: as the kernel wants them
        self.left = int(self._views[:, 1].sum())
        room = np.empty(self._library.holdfast_passage_bytes() + _LINE, np.uint8)
        self._room, self._at = room, address_of(room) + -address_of(room) % _LINE
        body = self.left - head - tail
        self._library.holdfast_passage(self._at, address_of(self._views), head, body, tail)

    def send(self, sock: socket.socket) -> int:
        """Send until all is sent or the socket's time is up; how many bytes. Fails: OSError."""
        return self._moved(sock, sending=True)

    def receive(self, sock: socket.socket) -> int:
        """The same for receiving. Fails: OSError, with ENODATA if the other side has ended the connection."""
        return self._moved(sock, sending=False)

    def _moved(self, sock: socket.socket, *, sending: bool) -> int:
        moved: int = self._library.holdfast_pass(self._at, sock.fileno(), sending)
        if moved < 0:
            raise OSError(-moved, os.strerror(-moved))
        self.left -= moved
        return moved

    def is_right(self) -> bool:
        """Whether what was received is what its digest says."""
        return bool(self._library.holdfast_passed(self._at))
