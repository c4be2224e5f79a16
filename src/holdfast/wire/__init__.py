"""Framed messages between processes, with limits checked before memory is taken."""

from holdfast.wire.frames import ConnectionLost, FrameSocket

__all__ = ["ConnectionLost", "FrameSocket"]
