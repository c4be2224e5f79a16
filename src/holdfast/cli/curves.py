"""Curves for people: in characters on a terminal, as a picture in a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise
from typing import Final, NamedTuple

from holdfast.train.quantities import short_count

Points = Sequence[tuple[float, float]]
"""Places and values, by rising places."""

_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
_WIDTH, _PANEL, _LEFT, _RIGHT, _TOP, _GAP, _BOTTOM = 760, 150, 64, 16, 40, 34, 34
_STYLE: Final = (
    "text{font:12px system-ui,sans-serif;fill:#222}.t{font-weight:600;font-size:14px}.g{fill:#666}"
)


def chart(points: Points, *, width: int = 64, height: int = 6) -> list[str]:
    """Lines of characters, the highest first: a column for each of `width` places, in eighths of a line."""
    first, last = points[0][0], points[-1][0]
    most = max(value for _, value in points) or 1.0
    columns = [value_at(points, first + (last - first) * at / (width - 1)) / most for at in range(width)]
    lines = []
    for row in reversed(range(height)):
        eighths = [min(8, max(0, round((share * height - row) * 8))) for share in columns]
        lines.append("".join(_EIGHTHS[one] for one in eighths).rstrip())
    return lines


def value_at(points: Points, place: float) -> float:
    """The value on the straight line between the points around `place`."""
    for (left, low), (right, high) in pairwise(points):
        if place <= right:
            return low if right == left else low + (high - low) * (place - left) / (right - left)
    return points[-1][1]


class Panel(NamedTuple):
    """One curve of a picture."""

    title: str
    points: Points
    shown: Callable[[float], str]
    """A value as text."""
    steps: bool = False
    """Whether a value holds until the next point, instead of a line to it."""


def picture(
    title: str, panels: Sequence[Panel], axis: str, shown: Callable[[float], str] = short_count
) -> str:
    """An SVG file: panels under each other, over one axis."""
    height = _TOP + len(panels) * (_PANEL + _GAP) + _BOTTOM
    last = max(place for panel in panels for place, _ in panel.points) or 1.0
    size = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        f'<text class="t" x="8" y="22">{escape(title)}</text>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, _TOP + number * (_PANEL + _GAP), last)
    bottom = height - _BOTTOM
    for at in range(5):
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * at / 4
        anchor = "end" if at == 4 else "middle"
        parts.append(
            f'<text class="g" x="{x:.1f}" y="{bottom}" text-anchor="{anchor}">{shown(last * at / 4)}</text>'
        )
    parts.append(f'<text class="g" x="{_LEFT}" y="{bottom + 20}">{escape(axis)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, top: int, last: float) -> list[str]:
    most = max(value for _, value in panel.points) or 1.0
    right, floor = _WIDTH - _RIGHT, top + _GAP + _PANEL - 24

    def at(place: float, value: float) -> str:
        x = _LEFT + (right - _LEFT) * place / last
        return f"{x:.1f},{floor - (_PANEL - 24) * value / most:.1f}"

    corners: list[str] = []
    for number, (place, value) in enumerate(panel.points):
        if panel.steps and number:
            corners.append(at(place, panel.points[number - 1][1]))
        corners.append(at(place, value))
    if panel.steps:
        corners.append(at(last, panel.points[-1][1]))
    roof = floor - (_PANEL - 24)
    return [
        f'<text x="8" y="{top + 16}">{escape(panel.title)}</text>',
        f'<path d="M{_LEFT},{roof}H{right}M{_LEFT},{floor}H{right}" stroke="#ddd" fill="none"/>',
        f'<text class="g" x="{_LEFT - 6}" y="{roof + 4}" text-anchor="end">{panel.shown(most)}</text>',
        f'<text class="g" x="{_LEFT - 6}" y="{floor + 4}" text-anchor="end">0</text>',
        f'<polyline points="{" ".join(corners)}" fill="none" stroke="#3b6fb6" stroke-width="2"/>',
    ]
