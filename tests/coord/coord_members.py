"""How the conformance tests make members that agree through a coordinator."""

from __future__ import annotations

from pathlib import Path

from holdfast.coord.coord_agreement import CoordAgreement


def member(place: str, rank: int, world: int) -> CoordAgreement:
    """A member of the run at `place`; its coordinator listens in that folder or one above it."""
    above = next(p for p in (Path(place), *Path(place).parents) if (p / "coord.sock").exists())
    return CoordAgreement(f"unix:{above}/coord.sock", rank=rank, world=world, scope=f"agreement{place}")
