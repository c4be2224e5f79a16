"""What a benchmark hands back: values against bars, and the raw numbers behind them."""

from __future__ import annotations

import io
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.table import Table


class Refused(Exception):
    """The benchmark cannot run here; the message says why and what would help."""


@dataclass(frozen=True, slots=True)
class Bar:
    """What a value has to reach."""

    meaning: str
    side: Literal["at least", "at most"]
    limit: float

    def __str__(self) -> str:
        return f"{'≥' if self.side == 'at least' else '≤'} {self.limit:g}"

    def passed(self, value: float) -> bool:
        """Whether a value is on the right side of this bar."""
        return value >= self.limit if self.side == "at least" else value <= self.limit


@dataclass(frozen=True, slots=True)
class Series:
    """All measurements of one thing."""

    values: tuple[float, ...]
    unit: str = "s"
    nbytes: int = 0
    """Bytes that each measurement moved; 0 if a rate would mean nothing."""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def rate(self) -> float | None:
        """GB/s at the median."""
        return self.nbytes / self.median / 1e9 if self.nbytes else None

    def encoded(self) -> dict[str, Any]:
        """The series as JSON."""
        return {
            "unit": self.unit,
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "gb_per_s": self.rate,
            "values": list(self.values),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of one benchmark."""

    bars: Mapping[str, Bar]
    values: Mapping[str, float | None]
    method: str
    versions: Mapping[str, str]
    raw: Mapping[str, Series]
    notes: Sequence[str] = field(default=())

    def as_json(self) -> str:
        """One object: every key that has a bar (null where not measured), method, versions, raw."""
        return json.dumps(
            {
                **{key: self.values.get(key) for key in self.bars},
                "method": self.method,
                "versions": dict(self.versions),
                "notes": list(self.notes),
                "raw": {name: series.encoded() for name, series in self.raw.items()},
            },
            ensure_ascii=False,
        )

    def as_text(self) -> str:
        """Tables for people."""
        from rich.console import Console

        console = Console(file=io.StringIO(), width=112)
        console.print(self.method, "\n", highlight=False)
        console.print(self._table())
        console.print(self._raw_table())
        for note in self.notes:
            console.print(f"note: {note}", highlight=False)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    def _table(self) -> Table:
        from rich.table import Table

        table = Table("key", "value", "bar", "", "meaning", box=None, pad_edge=False)
        for key, bar in self.bars.items():
            value = self.values.get(key)
            if value is None:
                table.add_row(key, "–", str(bar), "not measured", bar.meaning)
            else:
                table.add_row(
                    key, f"{value:.3g}", str(bar), "pass" if bar.passed(value) else "MISS", bar.meaning
                )
        return table

    def _raw_table(self) -> Table:
        from rich.table import Table

        table = Table("\nmeasured", "\nmedian", "\nmin .. max", "\nGB/s", box=None, pad_edge=False)
        for name, series in self.raw.items():
            rate = series.rate
            table.add_row(
                name,
                f"{series.median:.3f} {series.unit}",
                f"{min(series.values):.3f} .. {max(series.values):.3f}",
                "" if rate is None else f"{rate:.2f}",
            )
        return table
