"""What a worker gets from its agent at its start: descriptors and names, taken once and then gone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from holdfast.errors import UsageError
from holdfast.supervise.board import Board
from holdfast.supervise.messages import Order
from holdfast.supervise.stream import Stream, orders_of
from holdfast.supervise.stream import inherited as inherited_socket

CONTROL: Final = "HOLDFAST_CONTROL_FD"
_BOARD: Final = "HOLDFAST_BOARD_FD"
_TOKEN: Final = "HOLDFAST_TOKEN_FD"
_MAX_TOKEN: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Inheritance:
    """A worker's connection to its agent, and where things are."""

    run: str
    folder: str
    node: int
    coordinator: str
    vault: str
    vaults: tuple[str, ...]
    """Where the vaults of the other nodes are, as the agent knows it."""
    token: bytes | None
    launch: str
    board: Board
    orders: Stream[Order]


_taken: list[Inheritance] = []


def inheritance() -> Inheritance | None:
    """What this process was given by an agent; None if there is none. The token is in no descriptor after it.

    Fails: UsageError if the environment names an agent and the rest is missing.
    """
    if _taken:
        return _taken[0]
    control = os.environ.pop(CONTROL, "")
    if not control:
        return None
    # Children of the program are no workers: they must not find what is not theirs.
    board, token = os.environ.pop(_BOARD, ""), os.environ.pop(_TOKEN, "")
    try:
        found = Inheritance(
            run=os.environ["HOLDFAST_RUN"],
            folder=os.environ["HOLDFAST_FOLDER"],
            node=int(os.environ.get("HOLDFAST_NODE", "0")),
            coordinator=os.environ["HOLDFAST_COORD"],
            vault=os.environ.get("HOLDFAST_VAULT", ""),
            vaults=tuple(os.environ.get("HOLDFAST_VAULTS", "").splitlines()),
            token=_read(int(token)) if token else None,
            launch=os.environ.get("HOLDFAST_LAUNCH", ""),
            board=Board.open(int(board)),
            orders=orders_of(inherited_socket(int(control))),
        )
    except (KeyError, ValueError, OSError) as error:
        raise UsageError(
            f"{CONTROL} is set, but {error!r} is wrong with what the agent gave",
            hint=f"start workers with `holdfast launch`; to run alone, unset {CONTROL}",
        ) from error
    _taken.append(found)
    return found


def _read(fd: int) -> bytes | None:
    with os.fdopen(fd, "rb") as file:
        return file.read(_MAX_TOKEN).rstrip(b"\r\n") or None
