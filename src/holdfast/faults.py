"""Named fault sites: places where a test can make a process die, stall or fail. Free when off.

Code calls `faults.site("vault.block.written")`. A test arms sites in another process through the
environment, or in its own with `arm`:

    HOLDFAST_FAULTS="vault.block.written:kill@3;vault.voted:delay=0.5@1+"

Each rule is `site:action[@n]`. It fires once, at the nth hit of its site in a process (default
the first); with `@n+` it fires at every hit from the nth.
"""

from __future__ import annotations

import errno
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from holdfast.errors import UsageError

ENV = "HOLDFAST_FAULTS"

# Every site there is. A house test fails if one is named here and not planted, or the reverse.
SITES: dict[str, str] = {
    "trainer.save.begin": "save() was called; nothing is captured yet",
    "trainer.stage.block": "one block of state was copied into the arena",
    "trainer.stage.device": "some copies from a device are done, and not told",
    "trainer.stage.done": "all blocks lie in the arena; the save is staged",
    "trainer.durable.seen": "the trainer learned that the step is committed",
    "vault.begin": "the vault accepted a save and has not touched the disk",
    "vault.reserved": "disk space for the part files is reserved",
    "vault.block.written": "one block was written to a part file",
    "vault.part.synced": "a part file is complete and synced",
    "vault.index.written": "the part index is written and synced",
    "vault.voted": "this writer voted that its parts are durable",
    "vault.decided": "the writers agreed to commit",
    "vault.manifest.created": "the manifest exists: the step is committed",
    "vault.step.synced": "the folder that holds the manifest is synced",
    "mirror.block": "one block of a step was sent to the mirror",
    "mirror.part": "a part is on the mirror, its index is not",
    "mirror.complete": "all parts and indexes are on the mirror, the manifest is not",
    "mirror.manifest": "the manifest is on the mirror: the step is there, and nobody knows",
    "trainer.prune.manifest": "the manifest of a pruned step was removed",
    "trainer.prune.parts": "the part files of a pruned step were removed",
    "transfer.describe": "source: asked what it has, not answered; target: all peers have answered",
    "transfer.prepare": "source: a plan is checked, not answered; target: all peers have the plan",
    "transfer.run": "source: a run begins, not answered; target: all peers are asked for it",
    "transfer.chunk.sent": "a chunk went out, or was written into the target's memory",
    "transfer.chunk.received": "a chunk is in the target's memory and not counted yet",
    "transfer.borrowed": "all is copied out of memory that peers lent; they have not confirmed it yet",
    "transfer.commit": "everything has arrived and is verified; the old version is still in service",
    "transfer.done": "source: it heard of the outcome; target: swapped in, and nobody told",
    "reduce.folded": "a lane is folded and not announced",
    "reduce.announced": "all of this member's roots are announced, and nothing is added yet",
    "reduce.adding": "an owner is in the middle of adding its share",
    "reduce.published": "an owner told the others that its share of the total is there",
    "reduce.decided": "the whole total is here, and the call has not returned",
    "reduce.fetched": "a laggard has copied a decided total and has not checked it",
    "import.block.written": "one block of an imported step was written to its part file",
    "import.written": "an imported step is written and read back, and not committed",
    "export.committed": "some arrays of an export are in its unfinished folder",
    "export.written": "an export is written and read back, and not visible",
    "data.document": "one document of a token set is written aside",
    "data.named": "one of the files of a token set has its name",
    "run.joined": "a worker is in a new generation and has reported nothing",
    "run.gathered": "a worker has everybody's report and has not acted on it",
    "run.offered": "a donor has offered its state to newcomers",
    "run.receiving": "a newcomer knows what it will be given, and nothing has moved",
    "run.received": "a newcomer has a donor's state, and has not begun a step",
    "run.restored": "a worker has its state, and its program has not been given it",
    "run.step": "a step begins",
    "run.lane": "a lane is about to be given out",
    "run.added": "a lane has been added",
    "run.interrupted": "the members changed in the middle of a step, and nobody has regrouped",
    "run.decided": "the total of a step is here, and the program does not know",
}


def site(name: str) -> None:
    """Do what a rule armed for `name` says; without one, nothing."""
    armed = _armed
    if armed is not None:
        armed.hit(name)


def arm(spec: str) -> None:
    """Replace all armed rules of this process with those of `spec`, their hits counted from 0."""
    global _armed
    rules = _parse(spec)
    _armed = _Armed(rules) if rules else None


def disarm() -> None:
    """Turn every site off in this process."""
    global _armed
    _armed = None


def _kill(name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(name: str) -> None:
    # To this thread: of a signal to the process any thread may be the taker, and this one goes on meanwhile.
    signal.raise_signal(signal.SIGSTOP)


def _exit(name: str) -> NoReturn:
    os._exit(17)


def _os_error(number: int) -> Callable[[str], None]:
    def fail(name: str) -> None:
        raise OSError(number, f"{os.strerror(number)} (injected at {name})")

    return fail


def _raise(name: str) -> NoReturn:
    raise RuntimeError(f"injected at {name}")


_ACTIONS: dict[str, Callable[[str], None]] = {
    "kill": _kill,
    "stop": _stop,
    "exit": _exit,
    "eio": _os_error(errno.EIO),
    "enospc": _os_error(errno.ENOSPC),
    "raise": _raise,
}


@dataclass
class _Rule:
    site: str
    act: Callable[[str], None]
    nth: int
    repeat: bool
    hits: int = field(default=0)

    def due(self) -> bool:
        self.hits += 1
        return self.hits >= self.nth if self.repeat else self.hits == self.nth


class _Armed:
    def __init__(self, rules: list[_Rule]) -> None:
        self._rules = rules
        self._lock = threading.Lock()

    def hit(self, name: str) -> None:
        if name not in SITES:
            raise _unknown("fault site", name, SITES)
        with self._lock:
            due = [rule for rule in self._rules if rule.site == name and rule.due()]
        # Outside the lock: an action may take long, and other threads hit other sites meanwhile.
        for rule in due:
            rule.act(name)


_RULE = re.compile(r"(?P<site>[^:@]*):(?P<action>[^@]*)(?:@(?P<nth>\d+)(?P<repeat>\+?))?")


def _parse(spec: str) -> list[_Rule]:
    rules = []
    for text in filter(None, (part.strip() for part in spec.split(";"))):
        found = _RULE.fullmatch(text)
        if found is None or found["nth"] == "0":
            raise UsageError(
                f"fault rule {text!r} is not site:action[@n] with n >= 1",
                hint=f"for example {ENV}='vault.block.written:kill@3'",
            )
        if found["site"] not in SITES:
            raise _unknown("fault site", found["site"], SITES)
        rules.append(
            _Rule(
                site=found["site"],
                act=_action(found["action"]),
                nth=int(found["nth"] or 1),
                repeat=bool(found["repeat"]),
            )
        )
    return rules


def _action(text: str) -> Callable[[str], None]:
    if text in _ACTIONS:
        return _ACTIONS[text]
    word, _, value = text.partition("=")
    try:
        seconds = float(value) if word == "delay" else math.nan
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise _unknown("fault action", text, [*_ACTIONS, "delay=SECONDS"])
    return lambda name: time.sleep(seconds)


def _unknown(what: str, seen: str, valid: dict[str, str] | list[str]) -> UsageError:
    return UsageError(f"unknown {what} {seen!r}", hint=f"one of: {', '.join(valid)}")


_armed: _Armed | None = None
# A wrong HOLDFAST_FAULTS fails the import: a fault test that injects nothing must not pass.
arm(os.environ.get(ENV, ""))
