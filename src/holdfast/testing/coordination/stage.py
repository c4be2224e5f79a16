"""Scenarios as text: what members and the coordinator do, line by line, and what came of it.

    settings min_size=2 max_size=2
    start a b
    a: join slot=0
    b: join slot=1
    run 1
    ----
    a join: generation 1, slot 0 of 2
    b join: generation 1, slot 1 of 2

A block is commands, a line `----` and the output that they give, up to an empty line; `#` begins a comment.
`play` gives the text back with the output that it really gave, so a test compares two texts, and a scenario
is written by writing its commands (this is the way of etcd's raft tests). The core, the client and the
records are the real ones; nothing is left to chance: messages take a millisecond, the disk a little less.

    settings KEY=VALUE ...          the rules of the run; starts the coordinator
    start NAME ...                  a new process each, with a new incarnation
    NAME: CALL ARGUMENT ... [OPTION=VALUE ...]
                                    a call, not waited for: see CALLS
    run SECONDS                     let time pass; every outcome and every push is a line of output
    kill NAME [silently]            SIGKILL; silently: with its machine, so nobody hears of it
    pause NAME, resume NAME         SIGSTOP and SIGCONT; `coordinator` is a name here and for kill
    isolate NAME [up|down], heal NAME
                                    a partition, or one that holds only one direction back
    cut NAME [silently]             its connection breaks; silently: the coordinator does not hear of it
    power                           the coordinator's machine loses power
    restart coordinator
    repeat NAME NUMBER              the call NUMBER of NAME is sent once more on its present connection
    show members|keys|owed|waiting|stop
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, Final, final

from holdfast.coord import messages as m
from holdfast.coord.settings import Settings
from holdfast.errors import HoldfastError
from holdfast.testing.coordination.member import Member
from holdfast.testing.coordination.network import Network
from holdfast.testing.coordination.oracle import Oracle
from holdfast.testing.coordination.service import Service
from holdfast.testing.coordination.tasks import Ask, Record, Rest, Script
from holdfast.testing.coordination.telling import outcome_line, push_line
from holdfast.testing.coordination.world import Clock, World

_END: Final = "----"
_COORDINATOR: Final = "coordinator"


class SceneError(ValueError):
    """A line of a scenario that makes no sense."""


def play(text: str) -> str:
    """The scenario with the output that it gives. Fails: SceneError, Violation."""
    stage = Stage()
    out: list[str] = []
    expecting = False
    for number, line in enumerate(text.splitlines(), 1):
        if expecting:
            expecting = bool(line.strip())
            if expecting:
                continue  # what it said last time
        if line.strip() == _END:
            out += [line, *stage.take()]
            expecting = True
            continue
        out.append(line)
        command = line.partition("#")[0].strip()
        if command:
            try:
                stage.do(command)
            except (SceneError, KeyError, IndexError, TypeError) as error:
                raise SceneError(f"line {number}, {line!r}: {error!r}") from error
    stage.end()
    return "\n".join(out) + "\n"


@final
class Stage:
    """One scenario while it is played."""

    def __init__(self) -> None:
        self.world = World(0, still=True)
        self.network = Network(self.world)
        self.record = Record()
        self.members: dict[str, Member] = {}
        self._service: Service | None = None
        self._oracle: Oracle | None = None
        self._said: list[str] = []

    @property
    def service(self) -> Service:
        if self._service is None:
            raise SceneError("`settings` comes first")
        return self._service

    @property
    def oracle(self) -> Oracle:
        assert self._oracle is not None
        return self._oracle

    def take(self) -> list[str]:
        """What was said since the last time."""
        said, self._said = self._said, []
        return said

    def end(self) -> None:
        """What must hold at the end of any scenario."""
        if self._service is not None:
            self.oracle.compare()
        for problem in self.record.problems:
            raise SceneError(problem)

    def do(self, command: str) -> None:
        words = command.split()
        if words[0].endswith(":"):
            self._call(self.members[words[0][:-1]], words[1], words[2:])
            return
        verb = getattr(self, f"_do_{words[0]}", None)
        if verb is None:
            raise SceneError(f"no such command: {words[0]!r}")
        verb(*words[1:])

    # ---- commands

    def _do_settings(self, *words: str) -> None:
        kinds = {field.name: field.type for field in fields(Settings)}
        given = {key: _value(kinds[key], text) for key, _, text in (word.partition("=") for word in words)}
        self._service = Service(self.world, self.network, Settings(**given), Clock())
        self._oracle = Oracle(self._service, self.record, every=1)
        self._service.witness = self._oracle
        self._service.start()

    def _do_start(self, *names: str) -> None:
        for name in names:
            member = self.members.get(name)
            if member is None:
                member = Member(self.world, self.network, self.service, self.record, name, Clock(), _waiting)
                member.heard = self._heard
                member.restarts = False
                self.members[name] = member
            member.start()
        self._pass(0.02)

    def _do_run(self, seconds: str) -> None:
        self._pass(float(seconds))

    def _pass(self, seconds: float) -> None:
        self.world.run(self.world.now + seconds)

    def _do_kill(self, name: str, how: str = "") -> None:
        if name == _COORDINATOR:
            self.service.kill()
        else:
            self.members[name].kill(machine=how == "silently")
        self._pass(0.005)

    def _do_power(self) -> None:
        self.oracle.power_lost = True
        self.service.kill(power=True)

    def _do_restart(self, name: str) -> None:
        assert name == _COORDINATOR
        self.service.start()

    def _do_pause(self, name: str) -> None:
        (self.service if name == _COORDINATOR else self.members[name]).pause()

    def _do_resume(self, name: str) -> None:
        if name == _COORDINATOR:
            self.oracle.forgive()
            self.service.resume()
        else:
            self.members[name].resume()

    def _do_isolate(self, name: str, direction: str = "") -> None:
        self.network.block(name, {direction} if direction else {"up", "down"})

    def _do_heal(self, name: str) -> None:
        self.network.heal(name)

    def _do_cut(self, name: str, how: str = "") -> None:
        for conn in [conn for conn in self.network.live if conn.member == name]:
            self.network.break_off(conn, quiet="up" if how == "silently" else "")

    def _do_repeat(self, name: str, number: str) -> None:
        member = self.members[name]
        conn = next(conn for conn in self.network.live if conn.member == name)
        op = self.record.calls[member.incarnation, int(number)]
        assert member.core is not None
        self.network.send_up(conn, m.Call(int(number), int(number) - 1, member.core.generation, op))

    def _do_show(self, what: str) -> None:
        core = self.service.core
        assert core is not None
        ledger, view = core.ledger, core.overview()
        lines: dict[str, Callable[[], Iterator[str]]] = {
            "members": lambda: (
                f"slot {one.slot}: {one.incarnation} {one.state}{' out of sync' * one.out_of_sync}"
                for one in view.members
            ),
            "keys": lambda: (
                f"{key} = {entry.value.decode()}{' owned' if entry.owner else ''}"
                for key, entry in sorted(ledger.keys.items())
            ),
            "owed": lambda: (
                f"{kind} {name}: {sorted(ledger.sessions[sid].incarnation for sid in owed.sids)}"
                for (kind, name), all_owed in sorted(ledger.owed.items())
                for owed in all_owed
            ),
            "waiting": lambda: (
                f"{one.kind} {one.name}: there {list(one.present)}, missing {list(one.missing)}"
                for one in view.waiting
            ),
            "stop": lambda: iter([f"stop {view.stop.stop} at step {view.stop.step}"] if view.stop else []),
        }
        self._said += list(lines[what]()) or ["nothing"]

    # ---- calls

    def _call(self, member: Member, name: str, words: list[str]) -> None:
        given = [word for word in words if "=" not in word]
        options = dict(word.split("=", 1) for word in words if "=" in word)
        timeout_s = float(options.get("timeout", "5"))
        if name == "progress":
            assert member.core is not None
            member.core.progress(int(given[0]), options.get("phase", ""), member.now)
            return
        if name == "reached":
            member.spawn(self._reached(member, int(given[0]), timeout_s))
            return
        if name == "close":
            member.close()
            member.done = False
            return
        label = " ".join([member.name, name, *given])
        member.spawn(self._outcome(label, CALLS[name](given, options, timeout_s), timeout_s))

    def _outcome(self, label: str, op: m.Op, timeout_s: float) -> Script:
        began = self.world.now
        try:
            result = yield Ask(op, timeout_s)
        except HoldfastError as error:
            result = error
        took = self.world.now - began
        late = f" (after {took:.1f} s)" if took >= 0.05 else ""
        self._said.append(f"{label}: {outcome_line(result)}{late}")

    def _reached(self, member: Member, step: int, timeout_s: float) -> Script:
        core = member.core
        assert core is not None
        yield Rest(timeout_s, lambda: core.reached(step) is not None)
        answer = {True: "yes", False: "no", None: "not known"}[core.reached(step)]
        self._said.append(f"{member.name} reached {step}: {answer}")

    def _heard(self, member: Member, push: m.Push) -> None:
        line = push_line(push)
        if line:
            self._said.append(f"{member.name} is told: {line}")


def _waiting(member: Member) -> Script:
    """A process that does nothing by itself."""
    while True:
        yield Rest(3600.0)


def _value(kind: Any, text: str) -> Any:
    if kind == "bool":
        return {"yes": True, "no": False}[text]
    return {"int": int, "float": float, "str": str}[kind](text)


def _slots(options: dict[str, str]) -> tuple[int, ...] | None:
    text = options.get("slots")
    return None if text is None else tuple(int(part) for part in text.split(","))


def _meet(kind: str) -> Call:
    def call(given: list[str], options: dict[str, str], timeout_s: float) -> m.Op:
        name = given[0] if given else "run"
        note = options.get("note", "").encode()
        return m.Meet(kind, name, timeout_s, _slots(options), options.get("ok", "yes") == "yes", note)

    return call


def _bytes(text: str) -> bytes | None:
    return None if text == "nothing" else text.encode()


Call = Callable[[list[str], dict[str, str], float], m.Op]
CALLS: Final[dict[str, Call]] = {
    "join": lambda g, o, t: m.Join(
        int(o.get("slot", "-1")), t, o.get("standby") == "yes", o.get("failed") == "yes"
    ),
    "leave": lambda g, o, t: m.Leave(" ".join(g)),
    "bury": lambda g, o, t: m.Bury(g[0], "it exited"),
    "barrier": _meet(m.BARRIER),
    "vote": _meet(m.VOTE),
    "live": _meet(m.LIVE),
    "finish": _meet(m.FINISH),
    "cancel": lambda g, o, t: m.Cancel(g[0], " ".join(g[1:])),
    "set": lambda g, o, t: m.Put(g[0], g[1].encode(), o.get("owned") == "yes", o.get("create") == "yes"),
    "swap": lambda g, o, t: m.Swap(g[0], _bytes(g[1]), g[2].encode(), o.get("owned") == "yes"),
    "get": lambda g, o, t: m.Get(g[0]),
    "wait": lambda g, o, t: m.Get(g[0], t),
    "scan": lambda g, o, t: m.Scan(g[0]),
    "delete": lambda g, o, t: m.Delete(g[0], o.get("prefix") == "yes"),
    "add": lambda g, o, t: m.Add(g[0], int(g[1])),
    "report": lambda g, o, t: m.Report(" ".join(g)),
    "preempt": lambda g, o, t: m.Preempt("notice", int(o.get("past", "0"))),
}
