"""Draws which device holds what of one weight, from the rules that a run uses.

    python docs/pictures/parallelism.py > docs/pictures/parallelism.svg

Rows: what rests between two steps, for ZeRO 1, 2 and 3 on four devices of the fsdp axis. Below: what a block
of a tensor-parallel model does, and what crosses between two devices.
"""

from __future__ import annotations

import sys
from html import escape

from holdfast.train.mesh import FSDP, MeshConfig

WIDTH, LEFT, BOX, GAP = 960, 150, 34, 8
BLUE, PALE, ORANGE, GREY = "#3b6fb6", "#c9d8ec", "#e8963a", "#666"
NUM = 4


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(words)}</text>'


def weight(x: float, y: float, device: int, whole: bool) -> list[str]:
    """A weight of `NUM` rows; the share of `device`, or all of it, is filled."""
    height = BOX / NUM
    rows = range(NUM)
    return [
        f'<rect x="{x:g}" y="{y + height * row:g}" width="{BOX}" height="{height - 1:g}" '
        f'fill="{BLUE if whole or row == device else PALE}"/>'
        for row in rows
    ]


def zero(top: float) -> list[str]:
    """What each of four devices holds of a weight, its gradient and its two moments."""
    out = [text(8, top + 14, "What rests on each device of fsdp = 4, for one weight", "t")]
    columns = ("parameter", "gradient", "moments")
    for device in range(NUM):
        out.append(text(LEFT + 200 * device, top + 38, f"device {device}"))
        for at, column in enumerate(columns):
            out.append(text(LEFT + 200 * device + at * 62, top + 54, column, "g"))
    for line, level in enumerate((1, 2, 3)):
        y = top + 64 + line * (BOX + GAP)
        rules = MeshConfig(fsdp=NUM, zero=level).rules
        stored = rules.stored(("embed", "mlp"), (NUM, NUM))
        computed = rules.computed(("embed", "mlp"))
        resting = [stored if level >= least else computed for least in (3, 2, 1)]
        out.append(text(8, y + 21, f"zero = {level}"))
        for device in range(NUM):
            for at, split in enumerate(resting):
                out += weight(LEFT + 200 * device + at * 62, y, device, FSDP not in split)
    return out


STAGES = (
    ("stream", "sequence", "split along the sequence"),
    ("norm", "sequence", ""),
    ("gather", "", "all-gather"),
    ("gate, up", "mlp", "split along the width"),
    ("SwiGLU", "mlp", ""),
    ("down", "mlp", "a part of each sum"),
    ("scatter", "", "reduce-scatter"),
    ("+ stream", "sequence", "as before"),
)


def tensor(top: float) -> list[str]:
    """The MLP block on two devices of the tensor axis."""
    out = [text(8, top + 14, "An MLP block on tensor = 2, with sequence parallelism", "t")]
    step = (WIDTH - LEFT - 20) / len(STAGES)
    for device in range(2):
        out.append(text(8, top + 62 + 44 * device, f"device {device}"))
    for at, (name, logical, note) in enumerate(STAGES):
        x = LEFT + step * at
        if not logical:
            box = f'x="{x + 24:g}" y="{top + 40}" width="{step - 52:g}" height="78" rx="4"'
            out.append(f'<rect {box} fill="{ORANGE}"/>')
        else:
            split = MeshConfig(tensor=2).rules.computed((logical,)) == ("tensor",)
            for device in range(2):
                out += _half(x, top + 40 + 44 * device, step - 14, device, split, logical)
        out.append(text(x, top + 32, name if logical else note, "" if logical else "o"))
        if logical and note:
            out.append(text(x, top + 136 + 14 * (at % 2), note, "g"))
    return out


def _half(x: float, y: float, width: float, device: int, split: bool, logical: str) -> list[str]:
    """A block of activations; the half that the device has is filled: upper or lower rows, or columns."""
    rows = logical == "sequence"
    whole = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="34" fill="{PALE if split else BLUE}"/>'
    if not split:
        return [whole]
    across, down = (width, 17) if rows else (width / 2, 34)
    left, upper = (x, y + 17 * device) if rows else (x + width / 2 * device, y)
    part = f'<rect x="{left:g}" y="{upper:g}" width="{across:g}" height="{down:g}" fill="{BLUE}"/>'
    return [whole, part]


def svg() -> str:
    """The whole picture."""
    height = 400
    style = "text{font:12px system-ui,sans-serif;fill:#222}.t{font-weight:600;font-size:14px}"
    style += f".g{{font-size:11px;fill:{GREY}}}.o{{font-size:11px;fill:#a65d10}}"
    label = "Which device holds what of a weight, and what crosses between devices"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-label="{label}">\n<style>{style}</style>\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>\n'
        + "\n".join(zero(8) + tensor(232))
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    sys.stdout.write(svg())
