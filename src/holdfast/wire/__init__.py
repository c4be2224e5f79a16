"""Framed messages between processes, limits checked before memory is taken, and a handshake before them."""

from holdfast.wire.frames import ConnectionLost, FrameSocket
from holdfast.wire.handshake import (
    MAX_HANDSHAKE,
    NONCE_BYTES,
    ClientHandshake,
    ServerHandshake,
    refusal,
)
from holdfast.wire.splitter import FrameSplitter, framed

__all__ = [
    "MAX_HANDSHAKE",
    "NONCE_BYTES",
    "ClientHandshake",
    "ConnectionLost",
    "FrameSocket",
    "FrameSplitter",
    "ServerHandshake",
    "framed",
    "refusal",
]
