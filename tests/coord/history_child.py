"""A client process that calls, at random, and writes down what it called and what came of it.

python history_child.py ADDRESS LOG SEED OVER SLOT      (until the file OVER is there; SLOT -1: no member)
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import time

from holdfast.coord import messages as m
from holdfast.coord.client import CoordClient
from holdfast.errors import BarrierError, CoordError, DeadlineError, FencedError, StaleGenerationError
from tests.coord.histories import Began, Ended, Gone, Life, Line, encode

KEYS = ("a", "b", "g/x", "g/y")


class Recorder:
    """One process, through as many sessions as it takes."""

    def __init__(self, address: str, path: str, seed: int, over: str, slot: int) -> None:
        self.address = address
        self.rng = random.Random(seed)
        self.fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self.over = over
        self.slot = slot
        self.numbers = itertools.count(1)
        self.values = itertools.count(1)
        self.size = 0
        self.client: CoordClient

    def note(self, line: Line) -> None:
        os.write(self.fd, encode(line) + b"\n")

    def call(self, op: m.Op, timeout_s: float = 5.0) -> m.Result:
        """Make a call, with notes before and after. Fails: as the call."""
        number = next(self.numbers)
        slots = op.slots or tuple(range(self.size)) if isinstance(op, m.Meet) else ()
        self.note(Began(number, time.monotonic(), self.client.incarnation, op, self.client.slot, slots))
        try:
            result: m.Result = self.client._engine.call(op, timeout_s)
        except (CoordError, DeadlineError) as error:
            self.note(Ended(number, time.monotonic(), None, type(error).__name__))
            raise
        self.note(Ended(number, time.monotonic(), result))
        return result

    def run(self) -> None:
        while not os.path.exists(self.over):
            with CoordClient(self.address, connect_timeout_s=30.0) as self.client:
                started = time.monotonic()
                self.note(Life(started, self.client.incarnation))
                try:
                    while not os.path.exists(self.over):
                        self.work()
                except FencedError:
                    # When it was put out nobody knows; by now it is.
                    self.note(Gone(started, time.monotonic(), self.client.incarnation))
                else:
                    self.note(Gone(time.monotonic(), 0.0, self.client.incarnation))

    def work(self) -> None:
        try:
            if self.slot >= 0:
                self.member()
            else:
                self.call(self.key_call())
        except FencedError:
            raise
        except (CoordError, DeadlineError):
            pass

    def member(self) -> None:
        joined = self.call(m.Join(self.slot, 5.0), 5.0)
        assert isinstance(joined, m.Joined)
        self.size = joined.size
        while not os.path.exists(self.over):
            try:
                if self.rng.random() < 0.5:
                    self.call(self.key_call())
                self.call(m.Meet(m.BARRIER, "step", 2.0), 2.0)
            except (FencedError, StaleGenerationError):
                raise
            except (BarrierError, CoordError, DeadlineError):
                pass

    def key_call(self) -> m.Op:
        rng, roll, key = self.rng, self.rng.random(), self.rng.choice(KEYS)
        value = b"%d-%d" % (os.getpid(), next(self.values))
        if roll < 0.3:
            return m.Get(key)
        if roll < 0.5:
            return m.Put(key, value, rng.random() < 0.4, rng.random() < 0.3)
        if roll < 0.6:
            return m.Swap(key, None, value, rng.random() < 0.3)
        if roll < 0.8:
            return m.Add("n", rng.choice((1, 2**31)))
        if roll < 0.9:
            return m.Delete(key)
        return m.Scan("g/")


if __name__ == "__main__":
    Recorder(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5])).run()
