"""What a run of one has in the place of an agent and of other members."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol, final

from holdfast.reduce import Group, Member, Reducer

_ALONE_S: Final = 60.0


class Notes(Protocol):
    """The board on which a worker tells its agent where it is."""

    def progress(self, step: int) -> None: ...
    def phase(self, name: str) -> str: ...
    def compiling(self, now: bool) -> None: ...
    def waiting(self, name: str | None) -> None: ...


@final
class NoBoard:
    """A board that nobody reads."""

    def __init__(self) -> None:
        self._phase = "start"

    def progress(self, step: int) -> None:
        pass

    def phase(self, name: str) -> str:
        before, self._phase = self._phase, name
        return before

    def compiling(self, now: bool) -> None:
        pass

    def waiting(self, name: str | None) -> None:
        pass


@final
class Solo:
    """The others of a run of one."""

    def __init__(self, reducer: Reducer, num_lanes: int) -> None:
        self.reducer = reducer
        self.num_lanes = num_lanes
        self._lanes = {0: tuple(range(num_lanes))}
        me = Member(0, reducer.incarnation, reducer.address)
        reducer.regroup(Group(1, 0, (me,)))

    def lanes_at(self, step: int) -> Mapping[int, tuple[int, ...]]:
        return self._lanes

    def holder_of(self, step: int) -> int | None:
        return None

    def complete(self, step: int) -> None:
        self.reducer.exchange(_ALONE_S, lambda: None)

    def close(self) -> None:
        self.reducer.close()
