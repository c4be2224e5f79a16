"""An executable in a file: a JSON header, the bytes that PJRT made of the executable, and a seal.

    8 bytes   "HFBUNDLE"
    8 bytes   length of the header, little-endian
    header    JSON: what it is, and for what it was made
    payload   PJRT bytes
    32 bytes  HMAC-SHA256 of all before it, by the run's key

Whoever loads an executable runs its code. So nothing in a bundle is looked at before its seal is right, and
nothing of it reaches the runtime unless it was made for just what is here. Pure: no file, no framework.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Final, NoReturn, final

import msgspec
from msgspec import Struct

from holdfast.errors import BundleError, UsageError

FORMAT: Final = 1
MAX_HEADER: Final = 16 << 20
MAX_BUNDLE: Final = 8 << 30

_MAGIC: Final = b"HFBUNDLE"
_FRONT: Final = struct.Struct("<8sQ")
_SEAL: Final = 32
_PURPOSE: Final = b"holdfast executable bundle\0"
"""The run's key is used for other things too; a seal made for them is none here."""

_HINT: Final = "it is compiled again and the bundle replaced; nothing of it was loaded"


class Leaf(Struct, frozen=True):
    """One array that goes in or comes out."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    sharding: str


class Place(Struct, frozen=True):
    """What an executable was compiled for. It runs, to the same bits, only where all of it is equal."""

    jax: str
    jaxlib: str
    platform: str
    device_kind: str
    host: str
    """A digest of the processor's features, where it is compiled for them."""
    num_devices: int
    num_processes: int
    nproc: str
    """The size of the thread pool that computes (NPROC, else the processors); empty on accelerators."""
    flags: tuple[str, ...]
    """XLA_FLAGS, without those that only write dumps."""


class Header(Struct, frozen=True, forbid_unknown_fields=True):
    """What a bundle says of itself."""

    format: int
    name: str
    program: str
    """A digest of the StableHLO and the options to compile it with."""
    place: Place
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    donated: tuple[int, ...]
    payload_bytes: int
    payload_digest: str


@final
class Bundle:
    """An executable that is not loaded."""

    __slots__ = ("header", "payload")

    def __init__(self, header: Header, payload: bytes) -> None:
        self.header = header
        self.payload = payload

    def sealed(self, key: bytes) -> bytes:
        """The bytes of the file."""
        text = msgspec.json.encode(self.header)
        if len(text) > MAX_HEADER or len(self.payload) > MAX_BUNDLE - MAX_HEADER:
            raise UsageError(
                f"an executable of {len(self.payload):,} bytes with a header of {len(text):,} is too large",
                hint=f"the limits are {MAX_BUNDLE - MAX_HEADER:,} and {MAX_HEADER:,} bytes",
            )
        data = b"".join((_FRONT.pack(_MAGIC, len(text)), text, self.payload))
        return data + _seal(key, memoryview(data))

    @staticmethod
    def opened(data: bytes, key: bytes) -> Bundle:
        """The bundle in `data`. Fails: BundleError if it is not whole, not sealed by `key`, or too new."""
        if len(data) < _FRONT.size + _SEAL:
            _refuse(f"it has {len(data)} bytes, which is no bundle")
        body = memoryview(data)[:-_SEAL]
        if not hmac.compare_digest(_seal(key, body), data[-_SEAL:]):
            _refuse("its seal is not right: it was altered, cut off, or sealed with another key")
        magic, length = _FRONT.unpack_from(body)
        if magic != _MAGIC or length > min(MAX_HEADER, len(body) - _FRONT.size):
            _refuse("it does not begin like a bundle")
        front = _FRONT.size + length
        try:
            found: dict[str, object] = msgspec.json.decode(body[_FRONT.size : front])
            if found.get("format") != FORMAT:
                _refuse(f"it has format {found.get('format')!r}, and this is {FORMAT}")
            header = msgspec.convert(found, Header, strict=False)
        except (msgspec.MsgspecError, AttributeError) as error:
            _refuse(f"its header cannot be read: {error}")
        payload = bytes(body[front:])
        if len(payload) != header.payload_bytes or digest(payload) != header.payload_digest:
            _refuse("its payload is not the one that its header describes")
        return Bundle(header, payload)

    def check(self, program: str, place: Place) -> None:
        """Fails: BundleError, with all reasons, if it was made for another program or place."""
        header = self.header
        reasons = [] if header.program == program else ["it holds another program"]
        for field in Place.__struct_fields__:
            theirs, ours = getattr(header.place, field), getattr(place, field)
            if theirs != ours:
                reasons.append(f"it was made for {field} {theirs!r}, and here it is {ours!r}")
        if reasons:
            _refuse("; ".join(reasons))


def digest(data: bytes) -> str:
    """What names bytes: two executables with the same digest give the same bits in the same place."""
    return hashlib.sha256(data).hexdigest()


def check_key(key: bytes) -> None:
    """Fails: UsageError for a key that seals nothing."""
    if len(key) < 16:
        raise UsageError(
            f"a key of {len(key)} bytes cannot seal a bundle", hint="give the run's key, 16 bytes or more"
        )


def _seal(key: bytes, data: memoryview) -> bytes:
    made = hmac.new(key, _PURPOSE, hashlib.sha256)
    made.update(data)
    return made.digest()


def _refuse(reason: str) -> NoReturn:
    raise BundleError(f"the bundle is refused: {reason}", hint=_HINT)
