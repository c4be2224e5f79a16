"""How large the synthetic runs are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bench.scale.synthetic import SMALL, TEN_TB, TEN_THOUSAND, Mesh, Model


@dataclass(frozen=True, slots=True)
class Scale:
    """A state, who wrote it, who reads it, and how many steps a folder holds."""

    model: Model
    writers: Mesh
    readers: Mesh
    steps: int


SCALES: Final = {
    "full": Scale(TEN_TB, TEN_THOUSAND, Mesh(64, 8), 10_000),
    "smoke": Scale(SMALL, Mesh(16, 4), Mesh(4, 2), 50),
}
