"""Where a member is, and whether it has reached the step at which all stop."""

from __future__ import annotations

from typing import final

from holdfast.coord.messages import At, Stop


@final
class Stopping:
    """One member's side of a stop: announced, answered with how far this member has come, then decided."""

    def __init__(self) -> None:
        self.step = -1
        """The last step that this member has begun."""
        self.stop: Stop | None = None
        """The latest stop; its step is -1 until it is decided."""
        self.past = 0
        """The last stop that this member has come to."""
        self._at: At | None = None

    def heard(self, stop: Stop) -> None:
        """The coordinator tells of a stop; it may tell the same again."""
        known = self.stop
        if known is None or stop.stop > known.stop or (stop.stop == known.stop and known.step < 0):
            self.stop = stop

    def answer(self) -> At | None:
        """What the coordinator is to be told, if a stop is not decided: the same each time."""
        stop = self.stop
        if stop is None or stop.step >= 0:
            return None
        if self._at is None or self._at.stop != stop.stop:
            self._at = At(stop.stop, self.step)
        return self._at

    def reached(self, step: int) -> bool | None:
        """Whether `step` is at or after the stop; None while that is not known. False begins the step."""
        stop = self.stop
        if stop is not None and stop.step < 0:
            answered = self._at is not None and self._at.stop == stop.stop
            begun = self._at.step if self._at is not None and answered else self.step
            if step > begun:
                return None
        elif stop is not None and step >= stop.step:
            self.past = stop.stop
            return True
        self.step = max(self.step, step)
        return False
