"""What the members of a simulated run do: code as a user would write it, with choices made by the seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from holdfast.coord import messages as m
from holdfast.errors import BarrierError, CoordError, DeadlineError, FencedError, StaleGenerationError
from holdfast.testing.coordination.member import Member
from holdfast.testing.coordination.tasks import Ask, Rest, Script
from holdfast.testing.coordination.world import World

_KEYS = ("a", "b", "g/x", "g/y")


@dataclass(slots=True)
class Term:
    """Whether it is time to come to an end."""

    closing: bool = False
    over: bool = False
    """Everybody else has come to an end."""


@final
class Scripts:
    """The scripts of one simulation."""

    def __init__(self, world: World, term: Term, *, num_steps: int) -> None:
        self._world = world
        self._term = term
        self._num_steps = num_steps
        self._values = 0

    # ---- keys

    def _value(self) -> bytes:
        self._values += 1
        return b"v%d" % self._values

    def key_call(self) -> m.Op:
        """Some call about keys."""
        rng = self._world.rng
        key = rng.choice(_KEYS)
        roll = rng.random()
        if roll < 0.25:
            return m.Get(key)
        if roll < 0.40:
            return m.Put(key, self._value(), owned=rng.random() < 0.4, create=rng.random() < 0.3)
        if roll < 0.55:
            expected = None if rng.random() < 0.4 else b"v%d" % max(1, self._values - rng.randrange(3))
            return m.Swap(key, expected, self._value(), owned=rng.random() < 0.3)
        if roll < 0.75:
            return m.Add("n" if rng.random() < 0.8 else key, rng.choice((1, 1, 2**31, -3)))
        if roll < 0.85:
            return m.Delete("g/", prefix=True) if rng.random() < 0.3 else m.Delete(key)
        if roll < 0.93:
            return m.Scan("g/")
        return m.Get(rng.choice((*_KEYS, "never")), timeout_s=rng.random())

    def observer(self, member: Member) -> Script:
        """A client that is no member and works on keys."""
        rng = self._world.rng
        for _ in range(rng.randrange(4, 12)):
            if self._term.closing:
                break
            op = self.key_call()
            try:
                yield Ask(op, rng.uniform(0.5, 3.0))
            except FencedError:
                raise
            except CoordError:
                pass
            except DeadlineError:
                pass
            yield Rest(rng.uniform(0.0, 0.5))

    def agent(self, member: Member) -> Script:
        """A client that knows when processes die."""
        while not self._term.closing:
            yield Rest(0.5, lambda: bool(member.buried) or self._term.closing)
            while member.buried:
                try:
                    yield Ask(m.Bury(member.buried.pop(), "it exited"), 2.0)
                except FencedError:
                    raise
                except CoordError:
                    pass

    def watcher(self, member: Member) -> Script:
        """A client that does nothing but watch keys, until the last of the others is gone."""
        yield Rest(3600.0, lambda: self._term.over)

    def busy(self, member: Member) -> Script:
        """Calls about keys beside what the member does otherwise, on the same connection."""
        rng = self._world.rng
        for _ in range(rng.randrange(3, 8)):
            if self._term.closing:
                return
            try:
                yield Ask(self.key_call(), 2.0)
            except FencedError:
                return
            except (CoordError, DeadlineError):
                pass
            yield Rest(rng.uniform(0.0, 0.3))

    # ---- members

    def worker(self, slot: int) -> Callable[[Member], Script]:
        """A member that trains: joins, steps with barriers and votes, joins again when it must."""

        def script(member: Member) -> Script:
            step = 0
            while not self._term.closing and step < self._num_steps:
                if not (yield from self._joined(member, slot)):
                    continue
                while self._may_go_on(member) and step < self._num_steps:
                    try:
                        yield from self._step(member, step)
                    except FencedError:
                        raise
                    except (StaleGenerationError, BarrierError, DeadlineError):
                        step -= self._world.chance(0.5)
                    except CoordError:
                        pass  # a key that exists, a wrong caller
                    step += 1
            yield from self._ended(member)

        return script

    def _may_go_on(self, member: Member) -> bool:
        assert member.core is not None
        return not self._term.closing and member.rallied < member.core.generation and member.core.slot >= 0

    def _joined(self, member: Member, slot: int) -> Script:
        rng = self._world.rng
        try:
            timeout_s = rng.uniform(1.0, 6.0)
            got = yield Ask(m.Join(slot, timeout_s), timeout_s)
        except FencedError:
            raise
        except (CoordError, DeadlineError):
            yield Rest(rng.uniform(0.0, 0.2))
            return False
        if got.slot < 0:
            yield Rest(1.0, lambda: member.rallied >= got.generation or self._term.closing)
            return False
        return True

    def _step(self, member: Member, step: int) -> Script:
        """One step of training, and what may happen beside it."""
        world, rng = self._world, self._world.rng
        assert member.core is not None
        member.core.progress(step, "train" if step % 4 else "save", member.now)
        roll = rng.random()
        if roll < 0.3:
            yield Ask(self.key_call(), rng.uniform(0.5, 3.0))
        elif roll < 0.35:
            yield Ask(m.Report(f"step {step}"), 2.0)
        elif roll < 0.38:
            yield Ask(m.Cancel("step", "not needed"), 2.0)
        elif roll < 0.42:
            yield Ask(m.Preempt("notice", member.core.stopping.past), 2.0)
        elif roll < 0.5:
            yield Rest(rng.expovariate(4.0))
        kind = rng.random()
        timeout_s = rng.choice((0.3, 1.0, 3.0))
        if step % 5 == 4:
            yield Ask(
                m.Meet(m.VOTE, "commit", timeout_s, ok=rng.random() < 0.9, note=b"%d" % step), timeout_s
            )
        elif step % 7 == 6:
            yield Ask(m.Meet(m.LIVE, "live", timeout_s), timeout_s)
        elif kind < 0.06 and member.joined is not None and member.joined.size > 2:
            # A wrong caller: it must get its own error and hurt nobody.
            yield Ask(m.Meet(m.BARRIER, "step", timeout_s, slots=(0, 1)), timeout_s)
        elif world.chance(0.3) and member.joined is not None and member.joined.size > 2 and step % 3 == 0:
            if member.joined.slot < 2:
                yield Ask(m.Meet(m.BARRIER, "pair", timeout_s, slots=(0, 1)), timeout_s)
        else:
            yield Ask(m.Meet(m.BARRIER, "step", timeout_s), timeout_s)
        stop = member.core.reached(step)
        if stop is None:
            yield Rest(2.0, lambda: member.core is not None and member.core.reached(step) is not None)
        elif stop:
            member.stopped(step)

    def _ended(self, member: Member) -> Script:
        """Finish with the others, or just go."""
        roll = self._world.rng.random()
        try:
            if roll < 0.4 and member.core is not None and member.core.slot >= 0:
                yield Ask(m.Meet(m.FINISH, "run", 2.0), 2.0)
            elif roll < 0.7:
                yield Ask(m.Leave("done"), 2.0)
        except FencedError:
            pass
        except (CoordError, DeadlineError):
            pass
