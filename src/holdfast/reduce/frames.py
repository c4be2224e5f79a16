"""Frames on their way in and out of a link, without memory of their own for each.

A block passes through here several hundred times a step. Fresh memory for each of them costs more than
its copy: the pages are taken from the kernel and given back every time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, final

import numpy as np

from holdfast.arrays import Bytes1D
from holdfast.reduce.messages import check_of, data_front
from holdfast.wire import ConnectionLost

_HEAD: Final = struct.Struct("<I")
_CHECK: Final = 8
_FIRST: Final = 64 << 10
_BEYOND: Final = 2 << 20
"""Room behind a frame that is larger than all before it: those that follow it are read along."""


@final
class Inbox:
    """Bytes as they come, and the bodies of frames in them. After an error it is of no further use.

    A body is a view of memory that is used again: it is good until `space` is called.
    """

    __slots__ = ("_end", "_memory", "_need", "_start", "max_frame")

    def __init__(self, *, max_frame: int) -> None:
        self.max_frame = max_frame
        self._memory = memoryview(bytearray(_FIRST))
        self._start = self._end = 0
        self._need = _HEAD.size

    def space(self) -> memoryview:
        """Where the next bytes go; never empty."""
        size = len(self._memory)
        if self._start == self._end:
            self._start = self._end = 0
        if self._start + self._need > size:
            pending = self._memory[self._start : self._end]
            if self._need > size:
                self._memory = memoryview(bytearray(self._need + _BEYOND))
            else:
                pending = memoryview(bytes(pending))  # it may overlap with where it goes
            self._memory[: len(pending)] = pending
            self._start, self._end = 0, len(pending)
        return self._memory[self._end :]

    def took(self, nbytes: int) -> Iterator[memoryview]:
        """So many bytes were put there: the bodies that are whole now. Fails: ConnectionLost."""
        self._end += nbytes
        self._need = _HEAD.size
        while self._end - self._start >= _HEAD.size:
            (length,) = _HEAD.unpack_from(self._memory, self._start)
            if length > self.max_frame:
                raise ConnectionLost(
                    f"the peer announced a frame of {length:,} bytes; {self.max_frame:,} are allowed"
                )
            after = self._start + _HEAD.size + length
            if after > self._end:
                self._need = after - self._start
                return
            body = self._memory[self._start + _HEAD.size : after]
            self._start = after
            yield body


@final
class Chunk:
    """The frame of one block at a time. A frame is good until the next one is made."""

    __slots__ = ("_memory",)

    def __init__(self) -> None:
        self._memory: Bytes1D = np.empty(0, np.uint8)

    def frame(self, request: int, block: int, payload: Bytes1D) -> memoryview:
        """A copy of the payload, as the frame that `Data(request, block, payload)` would be."""
        front = data_front(request, block, payload.nbytes)
        body = _HEAD.size + _CHECK
        at = body + len(front)
        end = at + payload.nbytes
        if self._memory.nbytes < end:
            self._memory = np.empty(end, np.uint8)
        self._memory[at:end] = payload
        view = self._memory.data[:end]
        view[body:at] = front
        view[_HEAD.size : body] = check_of(view[body:])
        _HEAD.pack_into(view, 0, end - _HEAD.size)
        return view
