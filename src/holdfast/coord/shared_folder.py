"""Agreement through a folder or object store that all ranks can reach; survives a crash of any of them.

    <folder>/
      hello/<session>.invite          rank 0 invites
      hello/<session>.<rank>.<nonce>  rank r answers every invitation it sees
      hello/<session>.confirm         rank 0 lists the nonces it saw: only then is the session real
      <topic>.vote-<rank>             ballots
      <topic>.decision                the outcome: creating this file if absent decides

A stale invitation from an earlier launch is never confirmed with a fresh nonce, so it deceives nobody.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, final

import msgspec

from holdfast.clock import Deadline
from holdfast.coord.agreement import listing
from holdfast.errors import MissingPathError, MissingRanksError, UsageError
from holdfast.storage import Store

_MAX_RECORD: Final = 256 << 20  # a ballot of rank 0 carries the scalars and metadata of the manifest
_LOOKS_PER_S: Final = 20_000
"""How often all ranks together look whether a topic is decided: it is one metadata server they ask."""
HELLO: Final = "hello"
"""The folder in which the ranks of a launch find each other."""
_TOPIC: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,150}")


@final
class SharedFolderAgreement:
    """Agreement of `world` ranks through a shared folder, or a place in an object store."""

    def __init__(self, store: Store, *, rank: int, world: int) -> None:
        if not 0 <= rank < world:
            raise UsageError(f"rank {rank} is not in a world of {world}")
        self.rank = rank
        self.world = world
        self._store = store

    def session(self, timeout_s: float) -> str:
        self._store.make_root()
        self._store.make_folder(HELLO)
        deadline = Deadline(timeout_s)
        return self._invite(deadline) if self.rank == 0 else self._answer(deadline)

    def _invite(self, deadline: Deadline) -> str:
        session = uuid.uuid4().hex[:12]
        self._store.create(HELLO, f"{session}.invite", data=b"{}")
        nonces: dict[int, str] = {}
        asked = {str(rank) for rank in range(1, self.world)}
        while len(nonces) < self.world - 1:
            for name in self._store.names(HELLO):
                parts = name.split(".")
                if len(parts) == 3 and parts[0] == session and parts[1] in asked:
                    nonces[int(parts[1])] = parts[2]
            missing = [rank for rank in range(1, self.world) if rank not in nonces]
            self._wait(deadline, missing, "join the run's checkpoint session")
        self._store.create(HELLO, f"{session}.confirm", data=msgspec.json.encode(nonces))
        self._sweep(session)
        return session

    def _answer(self, deadline: Deadline) -> str:
        nonce = uuid.uuid4().hex
        answered: set[str] = set()
        while True:
            names = self._store.names(HELLO)
            for name in names:
                session, _, what = name.partition(".")
                if what == "invite" and session not in answered:
                    # An old session may be swept away by rank 0 while it is being answered.
                    with suppress(MissingPathError):
                        self._store.create(HELLO, f"{session}.{self.rank}.{nonce}", data=b"{}")
                        answered.add(session)
            for session in answered:
                if f"{session}.confirm" in names and self._confirms(session, nonce):
                    return session
            self._wait(deadline, [0], "open the run's checkpoint session")

    def _confirms(self, session: str, nonce: str) -> bool:
        try:
            data = self._store.read(HELLO, f"{session}.confirm", max_bytes=_MAX_RECORD)
        except MissingPathError:
            return False  # an old session, which rank 0 is sweeping away just now
        return msgspec.json.decode(data, type=dict[int, str]).get(self.rank) == nonce

    def _sweep(self, session: str) -> None:
        """Remove the records of earlier launches; the ranks of this one may still be reading theirs."""
        for name in self._store.names(HELLO):
            if not name.startswith(session):
                self._store.remove(HELLO, name)

    def vote(self, topic: str, ballot: bytes) -> None:
        self._store.create(self._name(topic, f"vote-{self.rank}"), data=ballot)

    def ballots(self, topic: str, timeout_s: float) -> Mapping[int, bytes]:
        deadline = Deadline(timeout_s)
        ballots: dict[int, bytes] = {}
        while True:
            cast = set(self._store.names())  # one look for all ranks: on an object store each costs a request
            for rank in range(self.world):
                name = self._name(topic, f"vote-{rank}")
                if rank not in ballots and name in cast:
                    ballots[rank] = self._store.read(name, max_bytes=_MAX_RECORD)
            missing = [rank for rank in range(self.world) if rank not in ballots]
            if not missing or self.decided(topic) is not None:
                return ballots
            self._wait(deadline, missing, f"vote on {topic}")

    def decide(self, topic: str, outcome: bytes) -> bytes:
        name = self._name(topic, "decision")
        if self._store.create(name, data=outcome):
            return outcome
        return self._store.read(name, max_bytes=_MAX_RECORD)

    def decided(self, topic: str, timeout_s: float = 0.0) -> bytes | None:
        name = self._name(topic, "decision")
        deadline, pause = Deadline(timeout_s), self._store.poll_s
        while True:
            with suppress(MissingPathError):  # it may be forgotten between the two
                if self._store.exists(name):
                    return self._store.read(name, max_bytes=_MAX_RECORD)
            if deadline.expired():
                return None
            time.sleep(min(pause, deadline.remaining()))
            pause = min(2 * pause, max(self._store.poll_s, self.world / _LOOKS_PER_S))

    def forget(self, topic: str) -> None:
        for rank in range(self.world):
            self._store.remove(self._name(topic, f"vote-{rank}"))
        self._store.remove(self._name(topic, "decision"))

    def topics(self) -> list[str]:
        found: dict[str, None] = {}
        for name in self._store.names():
            topic, _, what = name.rpartition(".")
            if topic and (what == "decision" or what.startswith("vote-")):
                found[topic] = None
        return list(found)

    def close(self) -> None:
        pass

    @staticmethod
    def _name(topic: str, what: str) -> str:
        if not _TOPIC.fullmatch(topic):
            raise UsageError(f"not a legal topic: {topic!r}")
        return f"{topic}.{what}"

    def _wait(self, deadline: Deadline, missing: list[int], what: str) -> None:
        if not missing:
            return
        if deadline.expired():
            listed = listing(missing)
            raise MissingRanksError(
                f"rank {listed} did not {what} in time"
                if len(missing) == 1
                else f"ranks {listed} did not {what} in time",
                ranks=missing,
                hint="look at the logs of those ranks: did they crash, hang or never start?",
            )
        time.sleep(min(self._store.poll_s, deadline.remaining()))
