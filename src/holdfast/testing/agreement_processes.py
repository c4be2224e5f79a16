"""The part of the conformance tests that needs real processes, and kills them.

@pytest.mark.process
class TestMineInProcesses(AgreementProcessConformance):
    factory = "tests.coord.members:mine"     # (place: str, rank: int, world: int) -> Agreement
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, final

from holdfast.testing import agreement_child

_ROUND: tuple[tuple[Any, ...], ...] = (
    ("session", 60.0),
    ("vote", "1.t", "yes"),
    ("ballots", "1.t", 60.0),
    ("decide", "1.t", "commit"),
    ("decided", "1.t"),
)
"""The calls of one rank in one save, in order."""


@final
class Member:
    """A member in a process of its own, called over its standard input."""

    def __init__(self, factory: str, place: Path, rank: int, world: int) -> None:
        self.rank = rank
        path = os.pathsep.join(filter(None, (os.getcwd(), *sys.path)))
        self._process = subprocess.Popen(
            [sys.executable, agreement_child.__file__, factory, str(place), str(rank), str(world)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )

    def send(self, *call: Any) -> None:
        """Have it make a call."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(call).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """What its oldest unanswered call has returned; `{"missing": ranks}` if ranks were missing."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process of rank {self.rank} has ended: {self._process.wait(10)}"
        return json.loads(line)

    def call(self, *call: Any) -> Any:
        self.send(*call)
        return self.answer()

    def kill(self) -> None:
        """End it at once, as the kernel or an operator does."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(10.0)

    def end(self) -> None:
        if self._process.poll() is None:
            self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class AgreementProcessConformance:
    """Tests of one implementation with `world` ranks, each a process.

    `exhaustive` False: at each moment of a save one rank dies, the first or the last in turn, not each.
    """

    world = 3
    exhaustive: ClassVar[bool] = True
    factory: ClassVar[str]

    @contextmanager
    def processes(self, place: Path, ranks: range) -> Iterator[dict[int, Member]]:
        """Members at `place`, ended in any case."""
        members = {rank: Member(self.factory, place, rank, self.world) for rank in ranks}
        try:
            yield members
        finally:
            for member in members.values():
                member.end()

    def test_processes_open_one_session_and_decide_once(self, tmp_path: Path) -> None:
        with self.processes(tmp_path, range(self.world)) as members:
            for member in members.values():
                member.send("session", 60.0)
            assert len({member.answer() for member in members.values()}) == 1
            for number in range(30):
                for rank, member in members.items():
                    member.send("decide", f"{number}.t", f"by {rank}")
                outcomes = {member.answer() for member in members.values()}
                assert len(outcomes) == 1, f"different decisions on one topic: {outcomes}"

    def test_killed_between_any_two_calls(self, tmp_path: Path) -> None:
        """For each rank and each moment: the others finish, and a successor finds what they found."""
        ends = (0, self.world - 1)
        for calls in range(1, len(_ROUND) + 1):
            for victim in ends if self.exhaustive else ends[calls % 2 :][:1]:
                place = tmp_path / f"{victim}-{calls}"
                place.mkdir()
                self._one_round(place, victim, calls)

    def _one_round(self, place: Path, victim: int, calls: int) -> None:
        with self.processes(place, range(self.world)) as members:
            survivors = [member for member in members.values() if member.rank != victim]
            for at, call in enumerate(_ROUND):
                present = survivors if at >= calls else list(members.values())
                if at == calls:
                    members[victim].kill()
                short = (*call[:2], 0.2) if call[0] == "ballots" and at >= calls else call
                for member in present:
                    member.send(*short)
                answers = [member.answer() for member in present]
                if calls == 1 and call[0] == "ballots":
                    # It died before its vote: it is named, and the others may give the save up.
                    assert answers == [{"missing": [victim]}] * len(present)
            outcomes = {member.call("decided", "1.t") for member in survivors}
            assert len(outcomes) == 1
            assert None not in outcomes
            with self.processes(place, range(victim, victim + 1)) as again:
                again[victim].call("vote", "1.t", "yes")
                assert {again[victim].call("decide", "1.t", "abort")} == outcomes
        with self.processes(place, range(self.world)) as members:
            for member in members.values():
                member.send("session", 60.0)
            assert len({member.answer() for member in members.values()}) == 1

    def test_killed_in_the_middle_of_a_call(self, tmp_path: Path) -> None:
        """Whatever a killed rank had decided before stands; whatever it had not, others can decide."""
        rng = random.Random(0)
        for round_ in range(5):
            place = tmp_path / str(round_)
            place.mkdir()
            told: dict[str, str] = {}
            num_told = rng.randrange(1, 60)
            with self.processes(place, range(1)) as members:
                for number in range(300):
                    members[0].send("decide", f"{number}.t", f"first {number}")
                for number in range(num_told):
                    told[f"{number}.t"] = members[0].answer()
                members[0].kill()
            with self.processes(place, range(1, 2)) as members:
                for number in range(num_told + 20):
                    topic = f"{number}.t"
                    outcome = members[1].call("decide", topic, f"second {number}")
                    assert outcome == told.get(topic, outcome)
                    assert outcome in (f"first {number}", f"second {number}")
