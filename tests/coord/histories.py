"""Histories of real processes: what each wrote down about its calls, and what all of it together says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from holdfast import errors
from holdfast.coord import messages as m

if TYPE_CHECKING:  # the processes that write histories import as little as possible
    from holdfast.testing.linearizability import Operation


class Began(Struct, tag=True):
    """A call was made. Times are those of CLOCK_MONOTONIC, which all processes of a machine share."""

    number: int
    at: float
    process: str
    op: m.Op
    slot: int = -1
    slots: tuple[int, ...] = ()


class Ended(Struct, tag=True):
    """It came back with a result, or with an error of the class `error`."""

    number: int
    at: float
    result: m.Result | None
    error: str = ""


class Life(Struct, tag=True):
    """The session stands."""

    at: float
    process: str


class Gone(Struct, tag=True):
    """The session is over: closed, or refused for good. It could be so from `since` on, and was so at `at`.

    `at` is 0 if nobody told; then it is so once the coordinator has no sessions left.
    """

    since: float
    at: float
    process: str


Line = Began | Ended | Life | Gone
encode = msgspec.json.encode
_decode = msgspec.json.Decoder(Line).decode


def read(path: Path, killed_at: float, over_by: float) -> list[Operation]:
    """The history of one process, killed at `killed_at` (inf: not) and gone for certain at `over_by`."""
    from holdfast.testing.coordination.tasks import code_of
    from holdfast.testing.linearizability import Operation, Vanish

    began: dict[int, Began] = {}
    ended: dict[int, Ended] = {}
    lives: list[Life] = []
    gone: dict[str, Gone] = {}
    data = path.read_bytes() if path.exists() else b""
    for text in data.split(b"\n")[:-1]:  # the last line of a killed process may be half there
        line = _decode(text)
        match line:
            case Began():
                began[line.number] = line
            case Ended():
                ended[line.number] = line
            case Life():
                lives.append(line)
            case Gone():
                gone[line.process] = line
    history = []
    for number, call in began.items():
        end = ended.get(number)
        result = end.result if end is not None else None
        if end is not None and end.error:
            code = code_of(getattr(errors, end.error))
            result = m.Refused(code, end.error) if code else None
        returned = end.at if end is not None and result is not None else math.inf
        history.append(Operation(call.process, call.op, result, call.at, returned, call.slot, call.slots))
    for life in lives:
        end_of = gone.get(life.process) or Gone(min(killed_at, over_by), over_by, life.process)
        history.append(Operation("-", Vanish(life.process), m.Done(), end_of.since, end_of.at or over_by))
    return history
