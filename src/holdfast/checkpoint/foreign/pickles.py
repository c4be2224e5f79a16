"""Pickles read as data: an interpreter that knows a few opcodes and calls nothing.

A pickle is a program for a stack machine. Three of its opcodes can run code (REDUCE, NEWOBJ and BUILD call
what GLOBAL looked up); here they only note what would have been called. GLOBAL imports nothing: it checks a
name against a list, and whatever is not on it is refused by name. `pickletools.genops` splits the bytes into
opcodes and does not execute them.

Dicts come back as pairs, and nothing is hashed, compared or copied on the way: a few opcodes can describe a
tuple that is nested a billion times over in shared references, which is harmless until somebody walks it.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final, final

from holdfast.arrays.text import show
from holdfast.errors import FormatError


@final
class RefusedError(FormatError):
    """A pickle that is whole but holds what is not data; the message has its name."""


Name = tuple[str, str]
"""Module and name of a class or function."""

MAX_OPCODES: Final = 1 << 30
"""Opcodes of one pickle; a torch checkpoint's metadata has about seventy for each shard of each tensor."""

_HINT: Final = (
    "only the classes that torch's distributed checkpoints consist of are read, and none of them is run"
)


@final
@dataclass(slots=True, eq=False)
class Global:
    """A class or function by name; never looked up."""

    name: Name

    def __str__(self) -> str:
        return ".".join(self.name)


@final
@dataclass(slots=True, eq=False)
class Called:
    """What a pickle would have made by calling `of` with `args`; `state` is what it would have set on it."""

    of: Global
    args: tuple[Any, ...]
    state: Any = None


@final
@dataclass(slots=True, eq=False)
class Pairs:
    """A dict, as its items in order."""

    items: list[tuple[Any, Any]] = field(default_factory=list)

    def get(self, key: str) -> Any:
        """The value under a text key; the last one, as in a dict. None if there is none."""
        return next((value for one, value in reversed(self.items) if type(one) is str and one == key), None)


@final
@dataclass(slots=True, eq=False)
class Persistent:
    """An object that the pickle names but that lies beside it."""

    id: Any


def interpreted(data: bytes, known: Collection[Name], *, what: str, max_opcodes: int = MAX_OPCODES) -> Any:
    """What the pickle in `data` describes: None, numbers, text, bytes, lists, tuples, and the classes above.

    `what` is its name in messages. Fails: FormatError for damaged bytes; RefusedError for a class, function
    or opcode that is not known.
    """
    machine = _Machine(frozenset(known), what)
    try:
        for count, (opcode, arg, at) in enumerate(pickletools.genops(data)):
            if count >= max_opcodes:
                raise FormatError(f"{what}: more than {max_opcodes:,} opcodes")
            step = _STEPS.get(opcode.name)
            if step is None:
                raise RefusedError(f"{what}: opcode {opcode.name} at byte {at} is refused", hint=_HINT)
            step(machine, arg)
    # What genops and a stack that ran empty raise for bytes that are no pickle.
    except (ValueError, IndexError, KeyError, TypeError, UnicodeError, OverflowError, EOFError) as error:
        raise FormatError(
            f"{what}: not a valid pickle: {type(error).__name__}: {show(str(error))}",
            hint="the file is damaged or truncated",
        ) from None
    return machine.result


class _Mark:
    pass


_MARK: Final = _Mark()


@final
class _Machine:
    """The stack and the memo."""

    def __init__(self, known: frozenset[Name], what: str) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.result: Any = None
        self._known = known
        self._what = what

    def pop(self) -> Any:
        found = self.stack.pop()
        if found is _MARK:
            raise ValueError("a mark where a value belongs")
        return found

    def top(self, kind: type[Any]) -> Any:
        found = self.stack[-1]
        if type(found) is not kind:
            raise ValueError(f"a {type(found).__name__} where a {kind.__name__} belongs")
        return found

    def above_mark(self) -> list[Any]:
        """Take everything above the last mark, and the mark."""
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("no mark on the stack")
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    def named(self, module: Any, name: Any) -> Global:
        if type(module) is not str or type(name) is not str:
            raise ValueError("the name of a class that is no text")
        if (module, name) not in self._known:
            raise RefusedError(
                f"{self._what}: names {show(f'{module}.{name}')}, which is refused", hint=_HINT
            )
        return Global((module, name))

    def called(self) -> None:
        args, of = self.pop(), self.pop()
        if type(of) is not Global or type(args) is not tuple:
            raise ValueError(f"a call of a {type(of).__name__} with a {type(args).__name__}")
        self.stack.append(Called(of, args))


def _global(machine: _Machine, arg: Any) -> None:
    module, _, name = str(arg).partition(" ")
    machine.stack.append(machine.named(module, name))


def _stack_global(machine: _Machine, arg: Any) -> None:
    name, module = machine.pop(), machine.pop()
    machine.stack.append(machine.named(module, name))


def _build(machine: _Machine, arg: Any) -> None:
    state = machine.pop()
    machine.top(Called).state = state


def _append(machine: _Machine, arg: Any) -> None:
    value = machine.pop()
    machine.top(list).append(value)


def _appends(machine: _Machine, arg: Any) -> None:
    values = machine.above_mark()
    machine.top(list).extend(values)


def _set_item(machine: _Machine, arg: Any) -> None:
    value, key = machine.pop(), machine.pop()
    _pairs(machine).items.append((key, value))


def _set_items(machine: _Machine, arg: Any) -> None:
    flat = machine.above_mark()
    _pairs(machine).items.extend(zip(flat[::2], flat[1::2], strict=True))


def _pairs(machine: _Machine) -> Pairs:
    """The dict on top; that of an OrderedDict, which is made by a call, is its state."""
    found = machine.stack[-1]
    if type(found) is Called:
        if found.state is None:
            found.state = Pairs()
        found = found.state
    if type(found) is not Pairs:
        raise ValueError(f"items for a {type(found).__name__}")
    return found


def _tuple(count: int) -> _Step:
    def step(machine: _Machine, arg: Any) -> None:
        values = [machine.pop() for _ in range(count)]
        machine.stack.append(tuple(reversed(values)))

    return step


def _pop(machine: _Machine, arg: Any) -> None:
    machine.stack.pop()


def _stop(machine: _Machine, arg: Any) -> None:
    machine.result = machine.pop()
    if machine.stack:
        raise ValueError(f"{len(machine.stack)} values are left over")


def _recall(machine: _Machine, arg: Any) -> None:
    machine.stack.append(machine.memo[int(arg)])


def _remember(machine: _Machine, arg: Any) -> None:
    found = machine.stack[-1]
    if found is _MARK:
        raise ValueError("a mark where a value belongs")
    machine.memo[len(machine.memo) if arg is None else int(arg)] = found


def _push(machine: _Machine, arg: Any) -> None:
    machine.stack.append(arg)


def _pushed(make: Callable[[], Any]) -> _Step:
    return lambda machine, arg: machine.stack.append(make())


_Step = Callable[[_Machine, Any], None]

_LITERALS: Final = (
    "BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE",
    "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8",
)  # fmt: skip

_STEPS: Final[dict[str, _Step]] = {
    **dict.fromkeys(_LITERALS, _push),
    **dict.fromkeys(("PROTO", "FRAME"), lambda machine, arg: None),
    **dict.fromkeys(("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"), _remember),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _recall),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda machine, arg: machine.called()),
    "NONE": _pushed(lambda: None),
    "NEWTRUE": _pushed(lambda: True),
    "NEWFALSE": _pushed(lambda: False),
    "EMPTY_TUPLE": _pushed(tuple),
    "EMPTY_LIST": _pushed(list),
    "EMPTY_DICT": _pushed(Pairs),
    "MARK": _pushed(lambda: _MARK),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "TUPLE": lambda machine, arg: machine.stack.append(tuple(machine.above_mark())),
    "APPEND": _append,
    "APPENDS": _appends,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "BUILD": _build,
    "BINPERSID": lambda machine, arg: machine.stack.append(Persistent(machine.pop())),
    "POP": _pop,
    "STOP": _stop,
}
