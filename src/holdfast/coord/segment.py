"""The bytes of the coordinator's log: segments of batches, and snapshots. Pure.

A segment is a head and batches. A batch is what one write(2) brings: some records, or none. It names the
number of its first record, how far the log was known to be on the disk at that time, and the checksum of
the batch before; its own covers all of that. Its seed is a random salt, the same in all files of a folder, so
that no value that somebody stores can be taken for a batch.

    segment   magic, salt, first number, checksum of the batch before, synced number, checksum
    batch     magic, size, count, first number, synced number, checksum of the batch before, checksum, body
    body      for each record: u32 length, MessagePack
    snapshot  magic, salt, number, checksum of the batch that holds that record, size, checksum, body

Torn or damaged? A power cut may take any sector that was written since the last sync, in any order, so a bad
batch before good ones proves nothing by itself. It is damage if anything after it says that it was synced.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, final

import msgspec
import xxhash

from holdfast.coord.records import Record

_SEGMENT: Final = struct.Struct("<8sQQQQQ")
_SEGMENT_MAGIC: Final = b"hfcoord1"
_BATCH: Final = struct.Struct("<4sIIQQQ")
_BATCH_MAGIC: Final = b"\xb5hfb"
_SNAPSHOT: Final = struct.Struct("<8sQQQQ")
_SNAPSHOT_MAGIC: Final = b"hfsnaps1"
_CHECK: Final = struct.Struct("<Q")
_LENGTH: Final = struct.Struct("<I")
SEGMENT_HEAD: Final = _SEGMENT.size
BATCH_HEAD: Final = _BATCH.size + _CHECK.size
SNAPSHOT_HEAD: Final = _SNAPSHOT.size + _CHECK.size

_digest: Final = xxhash.xxh3_64_intdigest
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Record)


class SegmentHead(NamedTuple):
    salt: int
    first: int
    before: int
    synced: int

    def encode(self) -> bytes:
        head = _SEGMENT.pack(_SEGMENT_MAGIC, *self, 0)[: -_CHECK.size]
        return head + _CHECK.pack(_digest(head))

    @staticmethod
    def decode(data: bytes | bytearray) -> SegmentHead | None:
        """None if these bytes are no head of a segment."""
        if len(data) < SEGMENT_HEAD:
            return None
        magic, salt, first, before, synced, check = _SEGMENT.unpack_from(data)
        if magic != _SEGMENT_MAGIC or check != _digest(data[: SEGMENT_HEAD - _CHECK.size]):
            return None
        return SegmentHead(salt, first, before, synced)


class Batch(NamedTuple):
    """Records from `first` on, at `offset` of the segment; the next batch is at `end`."""

    first: int
    num_records: int
    synced: int
    before: int
    check: int
    offset: int
    end: int


def encode_batch(
    records: Sequence[Record], *, first: int, synced: int, before: int, salt: int
) -> tuple[bytes, int]:
    """The batch, and its checksum."""
    body = bytearray()
    for record in records:
        at = len(body)
        body += b"\0\0\0\0"
        _encoder.encode_into(record, body, at + 4)
        _LENGTH.pack_into(body, at, len(body) - at - 4)
    head = _BATCH.pack(_BATCH_MAGIC, len(body), len(records), first, synced, before)
    check = _digest(head + body, seed=salt)
    return b"".join((head, _CHECK.pack(check), body)), check


def batch_at(data: bytes | bytearray, offset: int, salt: int) -> Batch | None:
    """The batch that begins at `offset`; None if none does."""
    if offset + BATCH_HEAD > len(data):
        return None
    magic, size, count, first, synced, before = _BATCH.unpack_from(data, offset)
    end = offset + BATCH_HEAD + size
    if magic != _BATCH_MAGIC or end > len(data):
        return None
    split = offset + _BATCH.size
    (check,) = _CHECK.unpack_from(data, split)
    if check != _digest(bytes(data[offset:split]) + data[split + _CHECK.size : end], seed=salt):
        return None
    return Batch(first, count, synced, before, check, offset, end)


def batches_after(data: bytes | bytearray, offset: int, salt: int) -> Iterator[Batch]:
    """Every batch from `offset` on, wherever it begins: for what follows a bad one."""
    while (at := data.find(_BATCH_MAGIC, offset)) >= 0:
        found = batch_at(data, at, salt)
        if found is not None:
            yield found
        offset = at + 1 if found is None else found.end


def records_of(data: bytes | bytearray, batch: Batch) -> Iterator[Record]:
    """The records of a batch. Fails: msgspec.MsgspecError or struct.error, if a newer Holdfast wrote it."""
    view = memoryview(data)
    at = batch.offset + BATCH_HEAD
    for _ in range(batch.num_records):
        (length,) = _LENGTH.unpack_from(view, at)
        yield _decoder.decode(view[at + 4 : at + 4 + length])
        at += 4 + length


@final
class Snapshot(NamedTuple):
    """A ledger as bytes, and where the log was at that moment."""

    salt: int
    number: int
    before: int
    body: bytes

    def encode(self) -> bytes:
        head = _SNAPSHOT.pack(_SNAPSHOT_MAGIC, self.salt, self.number, self.before, len(self.body))
        return b"".join((head, _CHECK.pack(_digest(head + self.body)), self.body))

    @staticmethod
    def decode(data: bytes | bytearray) -> Snapshot | None:
        """None if these bytes are no whole snapshot."""
        if len(data) < SNAPSHOT_HEAD:
            return None
        magic, salt, number, before, size = _SNAPSHOT.unpack_from(data)
        (check,) = _CHECK.unpack_from(data, _SNAPSHOT.size)
        body = bytes(data[SNAPSHOT_HEAD:])
        if magic != _SNAPSHOT_MAGIC or size != len(body):
            return None
        if check != _digest(bytes(data[: _SNAPSHOT.size]) + body):
            return None
        return Snapshot(salt, number, before, body)
