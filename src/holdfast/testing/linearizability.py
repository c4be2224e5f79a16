"""Whether a history of calls could have come from one coordinator that does one thing at a time.

    verdict = check(history)                keys: is there an order that explains every answer?
    problems = meeting_problems(history)    barriers, votes, live sets: an order on intervals

A history is a list of `Operation`. A call whose outcome is not known may have taken effect at any moment
after it was made, or never. That a dead incarnation's keys vanish is an operation of its own, `Vanish`: it
was "invoked" when the incarnation could first be given up and "returned" when it was known to be gone.

The search is Wing and Gong's with Lowe's memory, as in porcupine: it takes the calls in some order that
respects real time and asks the model of the keys whether each could have answered as it did, and it
remembers which sets of calls with which state led nowhere. Groups of keys (`group_of`) are checked one by
one: a history is linearizable if each group is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from holdfast.coord.messages import (
    EXISTS,
    FENCED,
    FINISH,
    OVER,
    Add,
    Count,
    Delete,
    Done,
    Get,
    Items,
    Meet,
    Met,
    Op,
    Put,
    Refused,
    Result,
    Scan,
    Swap,
    Swapped,
    Value,
)


@dataclass(frozen=True, slots=True)
class Vanish:
    """The keys that `owner` owns are gone, and nothing that it asks for is done any more."""

    owner: str


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of one client. `result` is None if it is not known; then `returned` is infinite.

    `process` is the incarnation that called. For meetings, `slot` is its slot and `slots` are all that take
    part.
    """

    process: str
    op: Op | Vanish
    result: Result | None
    invoked: float
    returned: float = math.inf
    slot: int = -1
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """`problem` is empty if the history is linearizable, else it says how far an order could be found."""

    problem: str = ""
    states: int = 0

    def __bool__(self) -> bool:
        return not self.problem


Cell: TypeAlias = tuple[bytes, str]
"""A key's value and the incarnation it belongs to ("": nobody)."""
State: TypeAlias = tuple[tuple[tuple[str, Cell], ...], frozenset[str]]
"""The keys of a group, in order, and the incarnations that are gone."""

_EMPTY: Final[State] = ((), frozenset())
_CHANGES: Final = (Put, Swap, Add, Delete)
_KEY_OPS: Final = (*_CHANGES, Get, Scan)
_MAX_STATES: Final = 2_000_000


def group_of(key: str) -> str:
    """Keys that one call can touch together are in one group: those below one folder."""
    folder, slash, _ = key.rpartition("/")
    return folder + slash if slash else key


# ---- the model of the keys


def next_state(state: State, done: Operation) -> State | None:
    """The state after the operation; None if it could not have answered so in this state."""
    items, gone = state
    op, result = done.op, done.result
    if isinstance(op, Vanish):
        left = tuple((key, cell) for key, cell in items if cell[1] != op.owner)
        return left, gone | {op.owner}
    if done.process in gone and isinstance(op, _CHANGES):
        return None
    keys = dict(items)
    if isinstance(op, Put | Swap | Add):
        changed = _set(keys, op, result, done.process)
    elif isinstance(op, Delete):
        changed = _delete(keys, op, result)
    else:
        return state if _reads(keys, op, result) else None
    if changed is None:
        return None
    return (tuple(sorted(keys.items())), gone) if changed else state


def _set(keys: dict[str, Cell], op: Put | Swap | Add, result: Result | None, process: str) -> bool | None:
    """Carry it out on `keys`; whether they changed, or None if the answer is impossible."""
    cell = keys.get(op.key)
    if isinstance(op, Add):
        if cell is not None and not _is_number(cell[0]):
            return False if result is None else None
        count = (int(cell[0]) if cell is not None else 0) + op.by
        if isinstance(result, Count) and result.count != count:
            return None
        # Whoever owns a counter still does after its own increments.
        keys[op.key] = (b"%d" % count, process if cell is not None and cell[1] == process else "")
        return True
    if isinstance(op, Swap):
        fits = op.expected == (cell[0] if cell is not None else None)
        if isinstance(result, Swapped) and result.done != fits:
            return None
        if (
            isinstance(result, Swapped)
            and not fits
            and result.value != (cell[0] if cell is not None else None)
        ):
            return None
    else:
        fits = not (op.create and cell is not None)
        if isinstance(result, Done) and not fits:
            return None
        if isinstance(result, Refused) and fits:
            return None
    if fits:
        keys[op.key] = (op.value, process if op.owned else "")
    return fits


def _delete(keys: dict[str, Cell], op: Delete, result: Result | None) -> bool | None:
    doomed = [key for key in keys if key.startswith(op.key)] if op.prefix else [op.key] * (op.key in keys)
    if isinstance(result, Count) and result.count != len(doomed):
        return None
    for key in doomed:
        del keys[key]
    return bool(doomed)


def _reads(keys: dict[str, Cell], op: Op, result: Result | None) -> bool:
    if isinstance(op, Get) and isinstance(result, Value):
        cell = keys.get(op.key)
        return result.value == (cell[0] if cell is not None else None)
    if isinstance(op, Scan) and isinstance(result, Items):
        there = [(key, cell[0]) for key, cell in sorted(keys.items()) if key.startswith(op.prefix)]
        return [(item.key, item.value) for item in result.items] == there
    return True


def _is_number(value: bytes) -> bool:
    try:
        int(value)
    except ValueError:
        return False
    return True


# ---- the search


def check(history: Iterable[Operation], *, max_states: int = _MAX_STATES) -> Verdict:
    """Whether the calls on keys in `history` are linearizable. Other calls in it are left out."""
    groups: dict[str, list[Operation]] = defaultdict(list)
    vanished: list[Operation] = []
    for done in history:
        if isinstance(done.op, Vanish):
            vanished.append(done)
        elif isinstance(done.op, _KEY_OPS) and (kept := _known(done)) is not None:
            groups[group_of(done.op.prefix if isinstance(done.op, Scan) else done.op.key)].append(kept)
    states = 0
    for group, calls in sorted(groups.items()):
        changers = {done.process for done in calls if isinstance(done.op, _CHANGES)}
        calls += [done for done in vanished if isinstance(done.op, Vanish) and done.op.owner in changers]
        verdict = linearize(calls, _EMPTY, next_state, max_states=max_states)
        states += verdict.states
        if not verdict:
            return Verdict(f"keys {group!r}: {verdict.problem}", states)
    return Verdict("", states)


def _known(done: Operation) -> Operation | None:
    """The operation as the search needs it; None if it says nothing."""
    result = done.result
    if isinstance(result, Refused):
        if result.code == EXISTS:
            return done
        if result.code not in (FENCED, OVER):
            return None  # refused: it was not done
        # Whoever was fenced in the middle of a call does not know whether it was carried out before.
        result = None
    if result is None:
        if not isinstance(done.op, _CHANGES):
            return None
        return Operation(done.process, done.op, None, done.invoked)
    return done


@dataclass(slots=True, eq=False)
class _Entry:
    """The beginning (`done` is set) or the end of an operation, in a list that it can be taken out of."""

    done: Operation | None
    bit: int = 0
    prev: _Entry | None = None
    next: _Entry | None = None
    end: _Entry | None = None


def linearize(
    history: Sequence[Operation],
    state: State,
    step: Callable[[State, Operation], State | None],
    *,
    max_states: int = _MAX_STATES,
) -> Verdict:
    """Whether some order of `history` that respects real time is one that `step` allows."""
    head = _entries(history)
    left = sum(1 for done in history if done.returned < math.inf)
    taken, seen = 0, set[tuple[int, State]]()
    path: list[tuple[_Entry, State]] = []
    order: _Order | None = None
    longest: tuple[int, _Order | None] = (0, None)
    entry = head.next
    while left:
        if entry is not None and entry.done is not None:
            after = step(state, entry.done)
            mark = (taken | entry.bit, after)
            if after is not None and mark not in seen:
                seen.add(mark)  # type: ignore[arg-type]
                if len(seen) > max_states:
                    return Verdict(f"undecided after {max_states} states", len(seen))
                path.append((entry, state))
                order = (entry.done, order)
                if len(path) > longest[0]:
                    longest = (len(path), order)
                state, taken = after, taken | entry.bit
                left -= entry.end is not None
                _lift(entry)
                entry = head.next
            else:
                entry = entry.next
            continue
        # The end of an operation that is not in the order yet: it should have come earlier.
        if order is None:
            return Verdict(_account(history, _listed(longest[1])), len(seen))
        entry, state = path.pop()
        order = order[1]
        taken &= ~entry.bit
        left += entry.end is not None
        _unlift(entry)
        entry = entry.next
    return Verdict("", len(seen))


_Order = tuple[Operation, "_Order | None"]
"""An order of operations, the last one first. What is tried behind it shares it: none is ever copied."""


def _listed(order: _Order | None) -> list[Operation]:
    found: list[Operation] = []
    while order is not None:
        found.append(order[0])
        order = order[1]
    return found[::-1]


def _entries(history: Sequence[Operation]) -> _Entry:
    marks: list[tuple[float, int, int, _Entry]] = []
    for index, done in enumerate(history):
        begin = _Entry(done, 1 << index)
        marks.append((done.invoked, 0, index, begin))
        if done.returned < math.inf:
            begin.end = _Entry(None)
            # At the same moment beginnings come first: calls that touch may have overlapped.
            marks.append((done.returned, 1, index, begin.end))
    marks.sort(key=lambda mark: mark[:3])
    head = last = _Entry(None)
    for _, _, _, entry in marks:
        last.next, entry.prev = entry, last
        last = entry
    return head


def _lift(entry: _Entry) -> None:
    for one in (entry, entry.end):
        if one is not None:
            assert one.prev is not None
            one.prev.next = one.next
            if one.next is not None:
                one.next.prev = one.prev


def _unlift(entry: _Entry) -> None:
    for one in (entry.end, entry):
        if one is not None:
            assert one.prev is not None
            one.prev.next = one
            if one.next is not None:
                one.next.prev = one


def _account(history: Sequence[Operation], best: Sequence[Operation]) -> str:
    """What a person needs: the longest order that was found, and the calls that fit nowhere after it."""
    placed = set(map(id, best))
    rest = [done for done in history if id(done) not in placed and done.returned < math.inf]
    rest.sort(key=lambda done: done.returned)
    state = _EMPTY
    for done in best:
        state = next_state(state, done) or state
    lines = [
        f"not linearizable; {len(best)} of {len(history)} calls could be put in order. The last of them:"
    ]
    lines += [f"    {describe(done)}" for done in best[-6:]]
    lines += [f"  which leaves {dict(state[0])!r}; then none of these fits:"]
    lines += [f"    {describe(done)}" for done in rest[:6]]
    return "\n".join(lines)


def describe(done: Operation) -> str:
    """The operation on one line."""
    until = f"{done.returned:g}" if done.returned < math.inf else "?"
    return f"[{done.invoked:g}, {until}] {done.process}: {done.op!r} -> {done.result!r}"


# ---- meetings


def meeting_problems(history: Iterable[Operation]) -> list[str]:
    """What is wrong with the barriers, votes and live sets in `history`; empty if nothing is.

    An epoch has one outcome: all that got it got the same; each participant that was there has it exactly
    once, or does not know. Nobody is let through before the last of those that were there had come. Epochs
    of one name and group are given to a member in rising order.
    """
    meets = [done for done in history if isinstance(done.op, Meet)]
    passed: dict[tuple[str, str, int], list[Operation]] = defaultdict(list)
    problems: list[str] = []
    last: dict[tuple[str, str, str, tuple[int, ...]], int] = {}
    for done in sorted(meets, key=lambda done: done.returned):
        if not isinstance(done.result, Met):
            continue
        kind, name = _meeting(done)
        passed[kind, name, done.result.epoch].append(done)
        member = (done.process, kind, name, done.slots)
        before = last.get(member, -1)
        if done.result.epoch <= before:
            problems.append(f"{describe(done)}: had epoch {before} of it before")
        last[member] = done.result.epoch
    for (kind, name, epoch), calls in sorted(passed.items()):
        problems += [f"{kind} {name!r} epoch {epoch}: {text}" for text in _epoch_problems(calls, meets)]
    return problems


def _meeting(done: Operation) -> tuple[str, str]:
    assert isinstance(done.op, Meet)
    return done.op.kind, done.op.name


def _epoch_problems(calls: list[Operation], meets: list[Operation]) -> list[str]:
    first = calls[0]
    assert isinstance(first.result, Met)
    problems = [
        f"two outcomes: {describe(first)} and {describe(other)}"
        for other in calls[1:]
        if other.result != first.result or other.slots != first.slots
    ]
    if len({done.process for done in calls}) != len(calls):
        problems.append(f"given twice to one caller: {[describe(done) for done in calls]}")
    strangers = {done.slot for done in calls} - set(first.slots)
    if strangers:
        problems.append(f"given to slots {sorted(strangers)}, but its slots are {first.slots}")
    earliest = min(done.returned for done in calls)
    for slot in set(first.slots) - set(first.result.absent):
        mine = [done for done in calls if done.slot == slot]
        # Who came and has not heard was counted all the same, and may have heard by its next call.
        mine += [
            done
            for done in meets
            if done.slot == slot and _meeting(done) == _meeting(first) and _may_count(done)
        ]
        if not any(done.invoked <= earliest for done in mine):
            problems.append(f"passed at {earliest:g}, before slot {slot} had come")
    return problems


def _may_count(done: Operation) -> bool:
    """Whether a call may have been counted although its caller was not let through by it.

    That is so if the caller does not know what became of it; and whoever came to a completion and waited in
    vain has come all the same.
    """
    result = done.result
    if result is None or _meeting(done)[0] == FINISH:
        return True
    return isinstance(result, Refused) and result.code in (FENCED, OVER)
