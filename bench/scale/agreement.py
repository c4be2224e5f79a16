"""The commit of one save by many simulated writers: what goes through the coordinator, and what it costs.

The coordinator's own core is driven with the calls that `CoordAgreement` makes, every message encoded and
decoded as on the wire; only sockets and the log's disk are left out. Rank 0 then makes the manifest.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import msgspec

from bench.scale.synthetic import Writers
from holdfast.coord.coordinator import Coordinator
from holdfast.coord.kernel import Effect, Opened, Received, Send, Write
from holdfast.coord.ledger import Ledger
from holdfast.coord.messages import Call, Changed, Get, Hello, Op, Put, Watch
from holdfast.coord.settings import Settings
from holdfast.format import PartEntry
from holdfast.vault.commit import COLLECTORS, Ballot

_PREFIX = "ckpt/0123456789abcdef/topic/1200.a1/"
_FRAME = 8
"""Bytes that the wire puts around a message."""


@dataclass(slots=True)
class Traffic:
    """What the coordinator took in and gave out for one commit."""

    cpu_s: float = 0.0
    messages_in: int = 0
    messages_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    records: int = 0


@final
class Simulation:
    """A coordinator and its clients in one process, without sockets."""

    def __init__(self, writers: int, collectors: int = COLLECTORS) -> None:
        self.collectors = min(collectors, writers)
        self.traffic = Traffic()
        self._writers = writers
        self._core = Coordinator(Settings(), Ledger(), service="bench", now=0.0)
        self._core.begin(now=0.0)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Call).decode
        self._seq = [0] * writers
        self._told: dict[int, int] = {}
        for rank in range(writers):
            self._core.step(Opened(rank + 1, Hello("run", f"rank-{rank}")), now=0.0)

    def commit(self, ballots: Iterable[bytes]) -> Traffic:
        """Have every writer vote, the collectors decide and everybody learn it. Takes the ballots by rank."""
        started = time.process_time()
        for rank in range(self.collectors):
            self._call(rank, Watch(_PREFIX))
        for rank, ballot in enumerate(ballots):
            key = f"{_PREFIX}vote-{rank}"
            self._call(rank, Get(key))
            self._call(rank, Put(key, ballot, create=True))
            if rank >= self.collectors:
                self._call(rank, Get(f"{_PREFIX}decision", 5.0))
        assert all(self._told[rank + 1] == self._writers for rank in range(self.collectors))
        for rank in range(self.collectors):
            self._call(rank, Get(f"{_PREFIX}decision"))
            self._call(rank, Put(f"{_PREFIX}decision", b"commit", create=True))
        self.traffic.cpu_s = time.process_time() - started
        return self.traffic

    def _call(self, rank: int, op: Op) -> None:
        self._seq[rank] += 1
        data = self._encode(Call(self._seq[rank], self._seq[rank] - 1, 0, op))
        self.traffic.messages_in += 1
        self.traffic.bytes_in += len(data) + _FRAME
        for effect in self._core.step(Received(rank + 1, self._decode(data)), now=0.0):
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Write):
            self.traffic.records += 1
            self._encode(effect.record)
        if not isinstance(effect, Send):
            return
        self.traffic.messages_out += 1
        self.traffic.bytes_out += len(self._encode(effect.answer)) + _FRAME
        body = effect.answer.body
        if isinstance(body, Changed):
            votes = sum(item.key.startswith(f"{_PREFIX}vote-") for item in body.items)
            self._told[effect.conn] = self._told.get(effect.conn, 0) + votes


def ballots_of(writers: Writers, parts: list[PartEntry]) -> list[bytes]:
    """The ballots that the writers of a save cast."""
    tree = msgspec.json.encode(writers.save).hex()[:32]
    return [msgspec.msgpack.encode(Ballot(part=part, tree=tree, created=1.7e9)) for part in parts]


def manifest_of(writers: Writers, ballots: list[bytes]) -> bytes:
    """What rank 0 does after the decision: all ballots decoded, the manifest made."""
    decode = msgspec.msgpack.Decoder(Ballot).decode
    return writers.manifest([part for ballot in ballots if (part := decode(ballot).part) is not None])
