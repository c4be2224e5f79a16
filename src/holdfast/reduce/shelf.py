"""What this member shows to the others: its banks, the notices about them, and the totals it still holds.

Two threads look at it, the caller's and the one that serves the links; both hold the lock of the links then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

from holdfast.arrays import Bytes1D
from holdfast.errors import ReduceError
from holdfast.reduce.banks import HEADER_BYTES, MAX_BANKS, Bank, Header
from holdfast.reduce.layout import FlatLayout
from holdfast.reduce.messages import (
    HEADER_BANK,
    Ask,
    Begun,
    Done,
    Held,
    Lend,
    Message,
    Ready,
    Shape,
    Share,
    Want,
)

Parcel = tuple[Message, int | None]
"""A message and the descriptor that goes with it."""
_NOTHING: Final = 0


@final
class Shelf:
    """Banks are made when they are needed and kept until the end."""

    def __init__(self, tell: Callable[[Message, int | None], None]) -> None:
        self._tell = tell
        self._header = Header()
        self._banks: list[Bank] = []
        self._free: list[Bank] = []
        self._notices: dict[type[Message], Message] = {}
        self._shares: list[Share] = []
        self.layout: FlatLayout | None = None
        self.totals: dict[int, Bank] = {}

    def shape(self, layout: FlatLayout, shape: Shape) -> None:
        """From now on trees are laid out like this."""
        self.layout = layout
        self.notify(shape)

    def notify(self, notice: Shape | Begun | Ready | Done) -> None:
        """Tell everybody, and whoever comes later."""
        self._notices.pop(type(notice), None)
        self._notices[type(notice)] = notice
        self._tell(notice, None)

    def publish(self, share: Share) -> None:
        """Tell everybody, and whoever comes while its bank lies there, also in later steps.

        A member without lanes may be linked only when all others are at the next step: it still needs it.
        """
        self._shares.append(share)
        self._tell(share, None)

    def unready(self) -> None:
        """Lanes are added again; whoever comes later does not hear that they were complete."""
        self._notices.pop(Ready, None)

    def withdraw(self) -> None:
        """What was said of sums is over; whoever comes later does not hear of it."""
        self.unready()
        self._shares.clear()

    # ---- banks

    def spare(self) -> Bank | None:
        """A bank that nobody uses, if there is one."""
        return self._free.pop() if self._free else None

    def made(self) -> Bank:
        """A new bank that nobody knows of; takes long, so without the lock. Fails: ReduceError."""
        if len(self._banks) == MAX_BANKS:
            raise ReduceError(f"more than {MAX_BANKS} sums at once", hint="deal lanes out in whole ranges")
        assert self.layout is not None
        return Bank(len(self._banks), self.layout.nbytes, self.layout.blocks, self._header.words)

    def show(self, bank: Bank) -> None:
        """Tell everybody of a bank that was just made."""
        self._banks.append(bank)
        self._tell(*_lent(bank))

    def give(self, bank: Bank) -> None:
        bank.void()
        self._shares = [share for share in self._shares if share.bank != bank.number]
        self._free.append(bank)

    def keep(self, step: int, bank: Bank) -> None:
        """The total of `step` is in `bank`; only that of the step before it stays beside it."""
        self.totals[step] = bank
        self.retire(step - 2)

    def retire(self, until: int) -> None:
        """Totals of `until` and earlier are needed no more."""
        for step in [step for step in self.totals if step <= until]:
            self.give(self.totals.pop(step))

    def drop(self, since: int) -> None:
        """Totals of `since` and later are held no more: these steps are done anew."""
        for step in [step for step in self.totals if step >= since]:
            self.give(self.totals.pop(step))

    # ---- what the links ask for

    def news(self, lent: bool) -> list[Parcel]:
        """All that a link needs to hear first; `lent` if it can carry descriptors."""
        parcels: list[Parcel] = []
        if lent:
            parcels.append((Lend(HEADER_BANK, HEADER_BYTES), self._header.fd))
            parcels += [_lent(bank) for bank in self._banks]
        return parcels + [(notice, None) for notice in (*self._notices.values(), *self._shares)]

    def held(self, want: Want) -> Held:
        """Whether the total of a step is here."""
        bank = self.totals.get(want.step)
        digest = "" if self.layout is None else self.layout.digest
        if bank is None:
            return Held(want.request, digest, 0, _NOTHING)
        return Held(want.request, digest, bank.number, bank.epoch)

    def block(self, ask: Ask, number: int) -> Bytes1D | None:
        """One block where it lies; None if there is none. Whoever has copied it asks whether it `stands`."""
        if self.layout is None or not (0 <= ask.bank < len(self._banks) and number < len(self.layout.blocks)):
            return None
        block = self.layout.blocks[number]
        return self._banks[ask.bank].flat.memory[block.lo : block.hi]

    def stands(self, ask: Ask) -> bool:
        """Whether the bank still has the epoch that was asked for, so what was read of it is of that."""
        return ask.epoch == self._banks[ask.bank].epoch != _NOTHING

    def close(self) -> None:
        """Give all descriptors back; memory that is still looked at stays."""
        for bank in self._banks:
            bank.close()
        self._header.close()
        self._banks.clear()
        self._free.clear()
        self.totals.clear()


def _lent(bank: Bank) -> Parcel:
    return Lend(bank.number, bank.flat.memory.nbytes), bank.fd
