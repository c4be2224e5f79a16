"""The two sides of a transfer, behind one protocol: what a source offers, a target takes."""

from __future__ import annotations

from typing import Any, Protocol

DEADLINE_S = 300.0
"""For every single wait of a side."""


class Source(Protocol):
    """It has the tree. `address` is what the target needs to reach it."""

    address: Any
    digest: str

    def offer(self, number: int) -> None:
        """Make transfer `number` (1, 2, ...) possible. Not measured: nothing may be moved here."""

    def close(self) -> None:
        """Let go of everything."""


class Target(Protocol):
    """It gets the tree, again and again."""

    def take(self, number: int, checked: bool) -> float:
        """Get the tree once more; the seconds from asking for it until all of it is here.

        `checked` is for those who can do it with and without checksums.
        """

    def digest(self) -> str:
        """Of the tree that came last."""

    def close(self) -> None:
        """Let go of everything."""
