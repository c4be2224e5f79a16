"""Frames out of a stream of bytes, without a socket in sight.

A frame is a little-endian u32 length and that many bytes. The length is checked before memory is taken.
"""

from __future__ import annotations

import struct
from typing import Final, final

from holdfast.wire.frames import ConnectionLost

_HEAD: Final = struct.Struct("<I")
_head_of = _HEAD.unpack_from


def framed(body: bytes) -> bytes:
    """The body as a frame."""
    return _HEAD.pack(len(body)) + body


@final
class FrameSplitter:
    """Takes bytes as they come and gives whole bodies. After an error it is of no further use.

    It holds less than `max_frame` bytes and one piece that was fed. `max_frame` may be changed between calls:
    the next head is measured by it.
    """

    __slots__ = ("_need", "_pending", "max_frame")

    def __init__(self, *, max_frame: int) -> None:
        self.max_frame = max_frame
        self._pending = bytearray()
        self._need = 0

    @property
    def num_pending(self) -> int:
        """Bytes of a frame that is not whole yet."""
        return len(self._pending)

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that are whole now, in order. Fails: ConnectionLost, for a frame beyond the limit."""
        pending = self._pending
        if pending:
            pending += data
            if len(pending) < self._need:
                return []
            data = bytes(pending)
            pending.clear()
        bodies: list[bytes] = []
        at, end = 0, len(data)
        while end - at >= 4:
            (length,) = _head_of(data, at)
            if length > self.max_frame:
                raise ConnectionLost(
                    f"the peer announced a frame of {length:,} bytes; {self.max_frame:,} are allowed"
                )
            after = at + 4 + length
            if after > end:
                self._need = after - at
                break
            bodies.append(data[at + 4 : after])
            at = after
        else:
            self._need = 4
        if at < end:
            pending += data[at:]
        return bodies
