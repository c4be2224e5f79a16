"""Draws how samples come about, from a real mixture and a real stream.

    python docs/pictures/data.py > docs/pictures/data.svg

Above: which source each sample comes from, and which sample of that source it is. Below: the middle of one
sample of the built-in corpus, where a document ends and the next one begins.
"""

from __future__ import annotations

from html import escape

import numpy as np

from holdfast.train.data import DataConfig
from holdfast.train.data.mixture import Mixture

WIDTH, CELL, LEFT = 960, 26, 96
COLOURS = ("#3b6fb6", "#e8963a", "#5a9e6f")
PALE = ("#c9d8ec", "#f7dfc2")
RED = "#b3261e"
GREY = "#666"
NUM = 32


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(words)}</text>'


def cell(x: float, y: float, fill: str, words: str, kind: str = "n") -> list[str]:
    box = f'<rect x="{x + 1:g}" y="{y:g}" width="{CELL - 2}" height="{CELL - 4}" rx="3" fill="{fill}"/>'
    return [box, text(x + CELL / 2, y + 15, words, f"{kind} m")]


def mixture(top: float) -> list[str]:
    """Samples 0 to 31 of 5 : 3 : 2 and, from sample 20 on, 1 : 1 : 8."""
    draw = Mixture((0, 20), ((5.0, 3.0, 2.0), (1.0, 1.0, 8.0))).draw(0, NUM)
    out = [text(8, top + 14, "Each sample comes from one source", "t"), text(8, top + 44, "sample k")]
    names = ("web  5 → 1", "code  3 → 1", "math  2 → 8")
    out += [text(8, top + 76 + 30 * row, name) for row, name in enumerate(names)]
    for k, (source, cursor) in enumerate(zip(draw.sources.tolist(), draw.cursors.tolist(), strict=True)):
        out.append(text(LEFT + CELL * (k + 0.5), top + 44, str(k), "m g"))
        out += cell(LEFT + CELL * k, top + 60 + 30 * source, COLOURS[source], str(cursor))
    edge = LEFT + CELL * 20
    out.append(f'<path d="M{edge} {top + 30}V{top + 150}" stroke="{GREY}" stroke-dasharray="4 3"/>')
    out.append(text(edge + 6, top + 168, "a stage: other weights from sample 20 on"))
    out.append(text(8, top + 168, "in the boxes: which sample of its source, in the order of its epoch"))
    return out


def sample(top: float) -> list[str]:
    """The tokens of the built-in corpus around an end of a document."""
    batch = DataConfig().build(seq_len=128).batch(0, 64)
    ends = np.argwhere(batch["tokens"] == 256)
    row, column = next((r, c) for r, c in ends.tolist() if 16 <= c < 128 - 16)
    first = column - 15
    out = [text(8, top + 14, "Documents that share a sample do not see each other", "t")]
    rows = ("tokens", "targets", "mask", "segments", "positions")
    out += [text(8, top + 48 + 30 * at, name) for at, name in enumerate(rows)]
    for at in range(NUM):
        here = first + at
        fill = PALE[int(batch["segments"][row, here]) % 2]
        counts = bool(batch["mask"][row, here])
        for line, name in enumerate(rows):
            number = int(batch[name][row, here])  # type: ignore[literal-required]
            letters = shown(number) if line < 2 else str(number)
            colour, kind = (fill, "d") if counts or line not in (1, 2) else (RED, "n")
            out += cell(LEFT + CELL * at, top + 32 + 30 * line, colour, letters, kind)
    out.append(text(8, top + 196, "red: the first token of a document is nobody's target"))
    return out


def shown(token: int) -> str:
    return "end" if token == 256 else {" ": "·", "\n": "↵"}.get(chr(token), chr(token))


def main() -> None:
    height = 420
    label = "Which source each sample comes from, and how documents share a sample"
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    style = "text{font:12px system-ui,sans-serif;fill:#222}.t{font-weight:600;font-size:14px}"
    style += ".m{text-anchor:middle}.n{font-size:11px;fill:#fff}.d{font-size:11px}.g{fill:#666}"
    print(f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">')
    print(f"<style>{style}</style>")
    print(f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>')
    print("\n".join([*mixture(8), *sample(208)]))
    print("</svg>")


if __name__ == "__main__":
    main()
