"""Framed messages between processes, with limits checked before memory is taken."""

from holdfast.wire.frames import MAX_FRAME, ConnectionLost, FrameSocket

__all__ = ["MAX_FRAME", "ConnectionLost", "FrameSocket"]
