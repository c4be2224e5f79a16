"""Agreement through the coordinator's keys; survives a crash of any rank, and of the coordinator.

    <scope>/hello/<session>/invite         rank 0 invites
    <scope>/answer/<session>/<rank>        rank r answers every invitation it sees, with a nonce
    <scope>/hello/<session>/confirm        rank 0 lists the nonces it saw: only then is the session real
    <scope>/topic/<topic>/vote-<rank>      ballots
    <scope>/topic/<topic>/decision         the outcome: creating this key decides
    <scope>/data/<topic>/<id>/<number>     the pieces of a large record, written before the key

Every record is created and never changed, so a call that is made again after a crash finds its own work done.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Final, TypeVar, final

import msgspec

from holdfast.clock import Deadline
from holdfast.coord.agreement import listing
from holdfast.coord.client import CoordClient
from holdfast.coord.messages import Changed
from holdfast.errors import DeadlineError, FencedError, KeyExistsError, MissingRanksError, UsageError

T = TypeVar("T")

_TOPIC: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,150}")
_INLINE: Final = 4 << 10
"""Smaller records lie in the key itself, and reach the others with the news of it."""
_PIECE: Final = 512 << 10
_NONCE: Final = 8
"""Bytes of a nonce: those of all ranks go to all ranks, in one value."""
_LOOK_S: Final = 2.0
"""How often a wait makes sure that it would still be told."""
_CALL_S: Final = 60.0
"""A coordinator that restarts is back much sooner."""


class _Record(msgspec.Struct, frozen=True, array_like=True):
    """What lies in a key: the bytes, or the id and number of their pieces."""

    data: bytes
    id: str = ""
    num_pieces: int = 0


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Record).decode


@final
class _Mirror:
    """The keys under a prefix, as far as this process has been told."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._changed = threading.Condition()
        self._keys: dict[str, bytes] = {}
        self._told = False

    def tell(self, changed: Changed) -> None:
        with self._changed:
            if changed.reset:
                self._keys.clear()
            for item in changed.items:
                name = item.key.removeprefix(self._prefix)
                if item.value is None:
                    self._keys.pop(name, None)
                else:
                    self._keys[name] = item.value
            self._told = True
            self._changed.notify_all()

    def wait(self, look: Callable[[Mapping[str, bytes]], T | None], deadline: Deadline) -> T | None:
        """The first thing but None that `look` sees; None if time runs out first."""
        with self._changed:
            # What is there already counts, however little time there is.
            self._changed.wait_for(lambda: self._told, _CALL_S)
            while True:
                found = look(self._keys)
                if found is not None or deadline.expired():
                    return found
                self._changed.wait(deadline.remaining())


@final
class _Latest:
    """The keys that a wait saw last. Looking at them one by one at every change would take their square."""

    def __init__(self) -> None:
        self.keys: Mapping[str, bytes] = {}

    def found(self, keys: Mapping[str, bytes], enough: bool) -> bool | None:
        """True, with the keys kept as they are now, if that is `enough`."""
        self.keys = dict(keys) if enough else keys
        return True if enough else None


@final
class CoordAgreement:
    """Agreement of `world` ranks through a coordinator.

    `coordinator` is a client, or the address (or addresses) of a coordinator that serves `run`; a connection
    of its own is made at the first call, made again whenever that is needed, and ended by `close`. `scope`
    keeps apart what must not be mixed up, such as two checkpoint folders of one run; all ranks give the same.
    """

    def __init__(
        self,
        coordinator: CoordClient | str | tuple[str, ...],
        *,
        rank: int,
        world: int,
        scope: str = "agreement",
        run: str = "run",
        token: bytes | None = None,
    ) -> None:
        if not 0 <= rank < world:
            raise UsageError(f"rank {rank} is not in a world of {world}")
        self.rank = rank
        self.world = world
        self._scope = scope
        self._run = run
        self._token = token
        self._owns = not isinstance(coordinator, CoordClient)
        self._lock = threading.Lock()
        self._client = coordinator if isinstance(coordinator, CoordClient) else None
        self._addresses = () if isinstance(coordinator, CoordClient) else coordinator

    # ---- the connection

    def _connected(self, timeout_s: float = _CALL_S) -> CoordClient:
        with self._lock:
            if self._client is None:
                self._client = CoordClient(
                    self._addresses,
                    run=self._run,
                    token=self._token,
                    name=f"rank {self.rank} of {self._scope}",
                    connect_timeout_s=min(timeout_s, _CALL_S),
                )
            return self._client

    def _do(self, act: Callable[[CoordClient], T]) -> T:
        """Carry something out that may be done twice without harm."""
        client = self._connected()
        try:
            return act(client)
        except FencedError:
            # Away for so long that the coordinator has forgotten this client: its records are all there.
            if not self._owns:
                raise
            with self._lock:
                if self._client is client:
                    self._client = None
            client.close()
            return act(self._connected())

    def close(self) -> None:
        """End the connection, if it is this object's own."""
        with self._lock:
            client, self._client = self._client, None if self._owns else self._client
        if client is not None and self._owns:
            client.close()

    def _await(
        self, prefix: str, look: Callable[[Mapping[str, bytes]], T | None], deadline: Deadline
    ) -> T | None:
        """The first thing but None that `look` sees under a prefix; None if time runs out first."""
        while True:
            mirror = _Mirror(prefix)
            watching, client = self._do(
                lambda client: (client.watch(prefix, mirror.tell, timeout_s=_CALL_S), client)  # noqa: B023
            )
            with watching:
                while not client.is_over:
                    slice_ = Deadline(min(_LOOK_S, deadline.remaining()))
                    found = mirror.wait(look, slice_)
                    if found is not None or deadline.expired():
                        return found

    def _get(self, key: str) -> bytes | None:
        return self._do(lambda client: client.get(key, _CALL_S))

    def _set(self, key: str, value: bytes) -> None:
        self._do(lambda client: client.set(key, value, timeout_s=_CALL_S))

    def _scan(self, prefix: str) -> dict[str, bytes]:
        return self._do(lambda client: client.scan(prefix, timeout_s=_CALL_S))

    def _delete(self, key: str, *, prefix: bool = False) -> None:
        self._do(lambda client: client.delete(key, prefix=prefix, timeout_s=_CALL_S))

    # ---- records

    def _create(self, key: str, topic: str, data: bytes) -> bool:
        """Create a record; False if there is one."""
        if len(data) <= _INLINE:
            return self._put(key, _encode(_Record(data)))
        record = _Record(b"", uuid.uuid4().hex, -(-len(data) // _PIECE))
        pieces = f"{self._scope}/data/{topic}/{record.id}/"
        for number in range(record.num_pieces):
            self._set(f"{pieces}{number}", data[number * _PIECE : (number + 1) * _PIECE])
        if self._put(key, _encode(record)):
            return True
        self._delete(pieces, prefix=True)
        return False

    def _put(self, key: str, value: bytes) -> bool:
        def act(client: CoordClient) -> bool:
            try:
                client.set(key, value, create=True, timeout_s=_CALL_S)
            except KeyExistsError:
                return client.get(key, timeout_s=_CALL_S) == value  # ours, from before a new session
            return True

        return self._do(act)

    def _read(self, topic: str, value: bytes | None) -> bytes | None:
        """The bytes of a record; None if there is none, or no more."""
        if value is None:
            return None
        record = _decode(value)
        if not record.num_pieces:
            return record.data
        pieces = f"{self._scope}/data/{topic}/{record.id}/"
        found = [self._get(f"{pieces}{number}") for number in range(record.num_pieces)]
        there = [piece for piece in found if piece is not None]
        return b"".join(there) if len(there) == record.num_pieces else None

    # ---- sessions

    def session(self, timeout_s: float) -> str:
        deadline = Deadline(timeout_s)
        return self._invite(deadline) if self.rank == 0 else self._answer(deadline)

    def _invite(self, deadline: Deadline) -> str:
        session = uuid.uuid4().hex[:12]
        place = f"{self._scope}/hello/{session}/"
        self._put(f"{place}invite", b"")
        seen = _Latest()

        def all_there(keys: Mapping[str, bytes]) -> bool | None:
            # Counted first: ranks of an earlier, larger launch may answer too, and are not ours.
            enough = len(keys) >= self.world - 1
            return seen.found(keys, enough and all(str(rank) in keys for rank in range(1, self.world)))

        # Where nobody else watches: all ranks would be told of the answers of all.
        if self._await(f"{self._scope}/answer/{session}/", all_there, deadline) is None:
            missing = [rank for rank in range(1, self.world) if str(rank) not in seen.keys]
            raise _missing(missing, "join the run's checkpoint session")
        nonces = (seen.keys[str(rank)] for rank in range(1, self.world))
        self._put(f"{place}confirm", b"".join((bytes(_NONCE), *nonces)))
        self._sweep(session)
        return session

    def _answer(self, deadline: Deadline) -> str:
        place = f"{self._scope}/hello/"
        nonce = uuid.uuid4().bytes[:_NONCE]
        answered: set[str] = set()

        def news(keys: Mapping[str, bytes]) -> tuple[str, bytes | None] | None:
            """An invitation to answer, or a confirmation with its nonces."""
            for name, value in keys.items():
                session, _, what = name.partition("/")
                if what == "invite" and session not in answered:
                    return session, None
                mine = value[self.rank * _NONCE : (self.rank + 1) * _NONCE]
                if what == "confirm" and session in answered and mine == nonce:
                    return session, value
            return None

        while (found := self._await(place, news, deadline)) is not None:
            session, confirmed = found
            if confirmed is not None:
                return session
            answered.add(session)
            # Set, not created: a rank that starts again answers an invitation that still stands anew.
            self._set(f"{self._scope}/answer/{session}/{self.rank}", nonce)
        raise _missing([0], "open the run's checkpoint session")

    def _sweep(self, session: str) -> None:
        """Remove the records of earlier launches; the ranks of this one may still be reading theirs."""
        for prefix in (f"{self._scope}/hello/", f"{self._scope}/answer/"):
            sessions = {key.removeprefix(prefix).partition("/")[0] for key in self._scan(prefix)}
            for old in sorted(sessions - {session}):
                self._delete(f"{prefix}{old}/", prefix=True)

    # ---- topics

    def vote(self, topic: str, ballot: bytes) -> None:
        key = self._key(topic, f"vote-{self.rank}")
        if self._get(key) is None:
            self._create(key, topic, ballot)

    def ballots(self, topic: str, timeout_s: float) -> Mapping[int, bytes]:
        deadline = Deadline(timeout_s)
        seen = _Latest()

        def enough(keys: Mapping[str, bytes]) -> bool | None:
            return seen.found(keys, "decision" in keys or len(keys) >= self.world)

        there = self._await(self._key(topic, ""), enough, deadline) is not None
        votes = {rank: seen.keys.get(f"vote-{rank}") for rank in range(self.world)}
        if not there:
            raise _missing([rank for rank, value in votes.items() if value is None], f"vote on {topic}")
        found = {rank: self._read(topic, value) for rank, value in votes.items()}
        return {rank: data for rank, data in found.items() if data is not None}

    def decide(self, topic: str, outcome: bytes) -> bytes:
        key = self._key(topic, "decision")
        while True:
            standing = self.decided(topic)
            if standing is not None:
                return standing
            if self._create(key, topic, outcome):
                return outcome

    def decided(self, topic: str, timeout_s: float = 0.0) -> bytes | None:
        key = self._key(topic, "decision")
        if timeout_s <= 0.0:
            return self._read(topic, self._get(key))
        try:
            return self._read(topic, self._do(lambda client: client.wait(key, timeout_s)))
        except DeadlineError:
            return None

    def forget(self, topic: str) -> None:
        self._delete(self._key(topic, ""), prefix=True)
        self._delete(f"{self._scope}/data/{topic}/", prefix=True)

    def topics(self) -> list[str]:
        """The topics that have records: those under way, and what crashed launches have left."""
        found: dict[str, None] = {}
        for kind in ("topic", "data"):
            prefix = f"{self._scope}/{kind}/"
            found.update((key.removeprefix(prefix).partition("/")[0], None) for key in self._scan(prefix))
        return list(found)

    def _key(self, topic: str, what: str) -> str:
        if not _TOPIC.fullmatch(topic):
            raise UsageError(f"not a legal topic: {topic!r}")
        return f"{self._scope}/topic/{topic}/{what}"


def _missing(ranks: list[int], what: str) -> MissingRanksError:
    listed = listing(ranks)
    who = f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
    return MissingRanksError(
        f"{who} did not {what} in time",
        ranks=ranks,
        hint="look at the logs of those ranks: did they crash, hang or never start?",
    )
