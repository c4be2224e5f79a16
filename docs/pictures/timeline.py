"""Draws what happened around each loss of a run, from its journal alone.

    python docs/pictures/timeline.py runs/demo-*/disturbed/journal.jsonl > docs/pictures/timeline.svg

One panel for each loss, one row for each slot. A bar is a step that the slot computed lanes of, from the end
of the step before to its own end; the number in it is how many lanes. Orange: the slot regroups.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from holdfast.journal import (
    LaneDigests,
    PartRestarted,
    Record,
    Regrouped,
    StateReceived,
    StepDone,
    WorkerExited,
    WorkerHung,
    WorkerLost,
    WorkerReplaced,
    read,
)

WIDTH, LEFT, RIGHT, ROW, TOP = 960, 84, 12, 24, 46
BLUE, PALE, ORANGE, GREY, RED = "#3b6fb6", "#c9d8ec", "#e8963a", "#666", "#b3261e"


class Mark(NamedTuple):
    """A moment of a panel, in words."""

    t: float
    text: str


class Panel(NamedTuple):
    """A stretch of the run: times are wall time, shown from `zero` on."""

    title: str
    zero: float
    begin: float
    end: float
    marks: list[Mark]


def slot_of(record: Record) -> int:
    """The slot of the worker that wrote a record."""
    return int(record.component.removeprefix("worker "))


def panels(records: Sequence[Record]) -> list[Panel]:
    """One for each loss of a worker, and for each restart of the coordinator."""
    found = []
    for one in records:
        if isinstance(one.event, WorkerLost):
            found.append(_loss(records, one.t, one.event))
        elif isinstance(one.event, PartRestarted):
            title = f"The {one.event.part} is killed"
            mark = Mark(one.t, f"it is started again (process {one.event.pid}); no step waits for it")
            found.append(Panel(title, one.t, one.t - 0.06, one.t + 0.14, [mark]))
    return found


def _loss(records: Sequence[Record], known: float, lost: WorkerLost) -> Panel:
    slot = lost.replica  # one worker per replica
    later = [one for one in records if one.t >= known - 0.05]
    hung = [one for one in records if isinstance(one.event, WorkerHung) and one.event.worker == lost.worker]
    if hung and isinstance(hung[0].event, WorkerHung):
        zero = hung[0].t - hung[0].event.seconds
        begin, title = zero - 0.1, f"Slot {slot} is stopped (SIGSTOP)"
        marks = [
            Mark(zero, "the process is seen to be stopped"),
            Mark(hung[0].t, "it counts as hung: stacks, SIGKILL"),
        ]
    else:
        gone = [o for o in later if isinstance(o.event, WorkerExited) and o.event.worker == lost.worker]
        zero = gone[0].t
        begin, title = zero - 0.06, f"Slot {slot} is killed (SIGKILL)"
        marks = [Mark(zero, "its agent sees the exit")]
    groups = [one for one in later if isinstance(one.event, Regrouped)]
    without = [o for o in groups if isinstance(o.event, Regrouped) and slot in o.event.lost]
    replaced = [o for o in later if isinstance(o.event, WorkerReplaced) and o.event.replica == lost.replica]
    received = [o for o in later if isinstance(o.event, StateReceived) and slot_of(o) == slot]
    working = [
        o for o in later if isinstance(o.event, LaneDigests) and o.event.slot == slot and o.t > received[0].t
    ]
    state, first = received[0].event, working[0].event
    assert isinstance(state, StateReceived)
    assert isinstance(first, LaneDigests)
    marks += [
        Mark(replaced[0].t, "the conductor gives the seat to a parked process"),
        Mark(max(one.t for one in without), "the others have regrouped and go on without it"),
        Mark(received[0].t, f"the newcomer has the state of step {state.step}, from slot {state.source}"),
        Mark(working[0].t, f"step {first.step} is done, with lanes of all"),
    ]
    return Panel(title, zero, begin, working[0].t + 0.06, sorted(marks))


def svg(records: Sequence[Record]) -> str:
    """The whole picture."""
    shown = panels(records)
    slots = sorted({one.event.slot for one in records if isinstance(one.event, LaneDigests)})
    parts: list[str] = []
    at = 0
    for panel in shown:
        height = TOP + ROW * len(slots) + 34 + 16 * len(panel.marks) + 22
        parts += _panel(panel, records, slots, at)
        at += height
    style = "text{font:12px system-ui,sans-serif;fill:#222}"
    style += ".t{font-weight:600;font-size:14px}.n{font-size:10px;fill:#fff}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {at}" width="{WIDTH}" height="{at}" '
        f'role="img" aria-label="Steps of each slot around each loss">\n<style>{style}</style>\n'
        f'<rect width="{WIDTH}" height="{at}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _panel(panel: Panel, records: Sequence[Record], slots: Sequence[int], at: int) -> list[str]:
    scale = (WIDTH - LEFT - RIGHT) / (panel.end - panel.begin)

    def x(t: float) -> float:
        return LEFT + scale * (min(max(t, panel.begin), panel.end) - panel.begin)

    parts = [f'<text class="t" x="8" y="{at + 20}">{escape(panel.title)}</text>']
    top = at + TOP
    for row, slot in enumerate(slots):
        y = top + ROW * row
        parts.append(f'<text x="8" y="{y + 16}">slot {slot}</text>')
        bars = [(x(a), x(b), colour, text) for a, b, colour, text in _bars(records, slot, panel)]
        parts += [_bar(left, right, y, colour) for left, right, colour, _ in bars]
        parts += [_label(left, right, y, text) for left, right, _, text in bars if text and right - left > 13]
    bottom = top + ROW * len(slots)
    step = 0.02 if panel.end - panel.begin < 0.5 else 0.2
    tick = step * round((panel.begin - panel.zero) / step)
    while panel.zero + tick < panel.end:
        if panel.zero + tick >= panel.begin:
            parts.append(
                f'<text x="{x(panel.zero + tick):.1f}" y="{bottom + 16}" text-anchor="middle" '
                f'style="fill:{GREY}">{round(1000 * tick)} ms</text>'
            )
        tick += step
    last = -99.0
    level = 0
    for number, mark in enumerate(panel.marks, 1):
        level = level + 1 if x(mark.t) - last < 14 else 0
        last = x(mark.t)
        parts.append(f'<path d="M{last:.1f} {top - 4}V{bottom}" stroke="{RED}" stroke-width="1.2"/>')
        parts.append(f'<text x="{last + 3 + 9 * level:.1f}" y="{top - 6}" style="fill:{RED}">{number}</text>')
        text = f"{number}   {1000 * (mark.t - panel.zero):.0f} ms: {mark.text}"
        parts.append(f'<text x="{LEFT}" y="{bottom + 34 + 16 * (number - 1) + 4}">{escape(text)}</text>')
    return parts


Bar = tuple[float, float, str, str]


def _bars(records: Sequence[Record], slot: int, panel: Panel) -> list[Bar]:
    """What a slot did: steps, and regrouping over them."""
    ends = {one.event.step: one.t for one in records if isinstance(one.event, StepDone)}
    bars: list[Bar] = []
    over: list[Bar] = []
    before = 0.0
    for one in records:
        if isinstance(one.event, LaneDigests) and one.event.slot == slot:
            begin = max(before, ends.get(one.event.step - 1, before))
            bars.append((begin, one.t, BLUE, str(len(one.event.lanes))))
            before = one.t
        elif isinstance(one.event, Regrouped) and slot_of(one) == slot:
            over.append((one.t - one.event.seconds, one.t, ORANGE, ""))
        elif isinstance(one.event, StateReceived) and slot_of(one) == slot:
            bars.append((one.t, ends.get(one.event.step, one.t), PALE, ""))
            before = one.t
    return [one for one in (*bars, *over) if one[1] > panel.begin and one[0] < panel.end]


def _bar(left: float, right: float, y: int, colour: str) -> str:
    box = f'x="{left:.1f}" y="{y + 3}" width="{max(0.8, right - left - 1):.1f}" height="{ROW - 7}" rx="2"'
    return f'<rect {box} fill="{colour}"/>'


def _label(left: float, right: float, y: int, text: str) -> str:
    return f'<text class="n" x="{(left + right) / 2:.1f}" y="{y + 15}" text-anchor="middle">{text}</text>'


def main() -> int:
    if len(sys.argv) != 2:
        print(f"usage: {sys.argv[0]} JOURNAL > PICTURE", file=sys.stderr)
        return 2
    # Lines of different processes may be slightly out of order.
    records = sorted(read(Path(sys.argv[1])), key=lambda one: one.t)
    sys.stdout.write(svg(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
