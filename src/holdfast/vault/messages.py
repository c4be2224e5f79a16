"""What trainer and vault say to each other.

    trainer                         vault
    Hello ------------------------>  (root, rank, world, agreement)
          <------------------------ Welcome
    MakeSlot / AdoptSlot(+fd) ---->
          <------------------------ SlotReady(+fd)
    Define(recipe) --------------->  what a save of this tree consists of; kept until redefined
    Begin(save, slot) ------------>  files are reserved
          <------------------------ Begun, where staged state is offered: now the slot may be written
    Ready(upto) ... -------------->  bytes below `upto` lie in the slot: they are hashed and written
    Staged ----------------------->  all bytes are there: from here the trainer may die
          <------------------------ Accepted
          <------------------------ Done(outcome)
    Abort ------------------------>  drop a save that is not staged
          <------------------------ Mirrored(save, ...), where there is a mirror: what became of its copy
    Holds(save, slot) ------------>  to a new vault: this slot has a staged state that is on disk already
    Awaits(save) ----------------->  to a new vault: tell what becomes of the copy of this committed save
    Bye -------------------------->  finish what is staged, copy what the mirror lacks, then end

    agent                           vault
    CopyFrom(node, address) ------>  keep a copy of what the vault at that address stages
          <------------------------ Noted

Losing the connection means the trainer died: staged saves are finished, others dropped. A vault that the
trainer spawned then ends; a standing one keeps the newest staged states.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from holdfast.format import ArrayEntry, SaveId, ScalarEntry, Slice
from holdfast.storage import StoreOptions


class Recipe(msgspec.Struct, frozen=True):
    """Everything about a save that does not change from step to step."""

    id: int
    part: int
    size: int
    slices: tuple[Slice, ...]
    arrays: tuple[ArrayEntry, ...]


class Order(msgspec.Struct, frozen=True):
    """One save."""

    seq: int
    recipe: int
    slot: int
    save: SaveId
    created: float
    scalars: tuple[ScalarEntry, ...]
    meta: bytes
    overwrite: bool = False
    deadline_s: float = 600.0


class Outcome(msgspec.Struct, frozen=True):
    """How a save ended. `kind` is the name of the error class, empty if it is committed."""

    nbytes: int = 0
    seconds: float = 0.0
    kind: str = ""
    message: str = ""
    hint: str | None = None
    path: str = ""
    errno: int | None = None

    @property
    def committed(self) -> bool:
        return not self.kind


class CoordinatorAt(msgspec.Struct, frozen=True):
    """Where the run's coordinator is. The token goes over private Unix sockets only, and is never shown."""

    addresses: tuple[str, ...]
    run: str
    token: bytes | None = None

    def __repr__(self) -> str:
        return f"CoordinatorAt({', '.join(self.addresses)}, run={self.run!r})"


class ServeAt(msgspec.Struct, frozen=True):
    """Where the vault is to offer staged state, for restores from its memory. The token is never shown."""

    bind: str
    run: str
    token: bytes | None = None
    linger_s: float = 30.0

    def __repr__(self) -> str:
        return f"ServeAt({self.bind}, run={self.run!r})"


class MirrorTo(msgspec.Struct, frozen=True):
    """A second place for the steps of a folder. What its options hold is never shown.

    The first step at or after each multiple of `every` goes there, at most `rate` bytes in a second; at the
    end of the run copying goes on for `drain_s` at most. `most` is how many of the newest stay there, where
    the trainer's policy is that simple: older ones need not be sent.
    """

    place: str
    every: int = 1
    most: int | None = None
    rate: float | None = None
    drain_s: float = 300.0
    options: StoreOptions | None = None

    def __repr__(self) -> str:
        return f"MirrorTo({self.place}, every={self.every})"


class Hello(msgspec.Struct, frozen=True, tag=True):
    root: str
    rank: int
    world: int
    agreement: str
    threads: int
    journal: str | None
    recycle: bool
    coordinator: CoordinatorAt | None = None
    serve: ServeAt | None = None
    store: StoreOptions | None = None
    mirror: MirrorTo | None = None
    session: str = ""
    """That of the agreement; the attempts of all saves begin with it."""


class MakeSlot(msgspec.Struct, frozen=True, tag=True):
    slot: int
    size: int


class AdoptSlot(msgspec.Struct, frozen=True, tag=True):
    slot: int
    size: int


class DropSlot(msgspec.Struct, frozen=True, tag=True):
    slot: int


class Define(msgspec.Struct, frozen=True, tag=True):
    recipe: Recipe


class Begin(msgspec.Struct, frozen=True, tag=True):
    order: Order


class Ready(msgspec.Struct, frozen=True, tag=True):
    seq: int
    upto: int


class Staged(msgspec.Struct, frozen=True, tag=True):
    seq: int


class Abort(msgspec.Struct, frozen=True, tag=True):
    seq: int
    reason: str


class Holds(msgspec.Struct, frozen=True, tag=True):
    """The slot of this save still has its bytes, though the save itself is over."""

    order: Order


class CopyFrom(msgspec.Struct, frozen=True, tag=True):
    """Keep copies of the states that the vault of `node` stages.

    `address` is where that vault is, or `file:PATH` of the file that says it, read again at every attempt;
    empty to keep no further copies of that node.
    """

    node: str
    address: str


class Awaits(msgspec.Struct, frozen=True, tag=True):
    """This save is committed, and its trainer has not heard what became of its copy on the mirror."""

    save: SaveId


class Bye(msgspec.Struct, frozen=True, tag=True):
    """The trainer ends. With `drain` it stays until the mirror has what it should; else it is not told."""

    drain: bool = True


Request = (
    Hello
    | MakeSlot
    | AdoptSlot
    | DropSlot
    | Define
    | Begin
    | Ready
    | Staged
    | Abort
    | Holds
    | Awaits
    | CopyFrom
    | Bye
)

REQUESTS: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(Request)


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """`address` is where the vault offers staged state, if it does.

    `own` and `copied` say how much host memory that takes at most: so many times the bytes that one trainer
    stages, for its own states and for those of a neighbour.
    """

    pid: int
    address: str = ""
    own: int = 0
    copied: int = 0


class Begun(msgspec.Struct, frozen=True, tag=True):
    """Nobody reads from the slot any more: it may be written. Sent where staged state is offered."""

    seq: int


class SlotReady(msgspec.Struct, frozen=True, tag=True):
    slot: int
    size: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request could not be served; the connection goes on."""

    kind: str
    message: str
    hint: str | None


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The save is staged: it no longer needs the trainer."""

    seq: int


class Done(msgspec.Struct, frozen=True, tag=True):
    seq: int
    outcome: Outcome


class Mirrored(msgspec.Struct, frozen=True, tag=True):
    """What became of a committed save on the mirror: it is whole there, it is left, or copying it fails."""

    save: SaveId
    state: Literal["whole", "left", "failing"]
    reason: str = ""


class Noted(msgspec.Struct, frozen=True, tag=True):
    """What was said is remembered."""


Reply = Welcome | SlotReady | Begun | Refused | Accepted | Done | Mirrored | Noted
REPLIES: Final[msgspec.msgpack.Decoder[Reply]] = msgspec.msgpack.Decoder(Reply)
