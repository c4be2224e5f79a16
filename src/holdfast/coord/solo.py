"""Agreement of a run with one writer: it agrees with itself."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import final

from holdfast.errors import MissingRanksError


@final
class SoloAgreement:
    """One rank; nothing is written anywhere."""

    rank = 0
    world = 1

    def __init__(self) -> None:
        self._ballots: dict[str, bytes] = {}
        self._outcomes: dict[str, bytes] = {}
        self._session = uuid.uuid4().hex[:12]

    def session(self, timeout_s: float) -> str:
        return self._session

    def vote(self, topic: str, ballot: bytes) -> None:
        self._ballots.setdefault(topic, ballot)

    def ballots(self, topic: str, timeout_s: float) -> Mapping[int, bytes]:
        if topic in self._ballots:
            return {0: self._ballots[topic]}
        if topic in self._outcomes:
            return {}
        # Nobody else could cast it while this call waits.
        raise MissingRanksError(f"rank 0 did not vote on {topic} in time", ranks=[0])

    def decide(self, topic: str, outcome: bytes) -> bytes:
        return self._outcomes.setdefault(topic, outcome)

    def decided(self, topic: str, timeout_s: float = 0.0) -> bytes | None:
        # Nobody else could decide while this call waits.
        return self._outcomes.get(topic)

    def forget(self, topic: str) -> None:
        self._ballots.pop(topic, None)
        self._outcomes.pop(topic, None)

    def topics(self) -> list[str]:
        return list({**self._ballots, **self._outcomes})

    def close(self) -> None:
        pass
