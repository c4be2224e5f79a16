"""`holdfast coord status` and `barriers`: how a run stands, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.cli import terminal
from holdfast.cli.terminal import Cell, Column, Styled
from holdfast.coord.messages import MemberState, Overview, Waiting

_STYLES: Mapping[str, str] = {"alive": "", "suspect": "yellow", "vacant": "red", "done": "green"}
_NAMES_SHOWN = 8


def say(seen: Overview) -> None:
    """The whole state: a line about the run, its members, open waits, what is stored."""
    terminal.say(f"run {seen.run}: {_stage(seen)}, term {seen.term}, service {seen.service}")
    if seen.stop is not None:
        where = "not yet agreed" if seen.stop.step < 0 else f"step {seen.stop.step}"
        terminal.say(f"stop {seen.stop.stop} at {where}: {seen.stop.reason or 'no reason given'}")
    if seen.members:
        terminal.say()
        _say_members(seen.members)
    if seen.standbys:
        terminal.say(f"\nstandby: {', '.join(seen.standbys)}")
    if seen.waiting:
        terminal.say("\nwaiting")
        say_waits(seen, indent=2)
    terminal.say(
        f"\n{terminal.count(seen.keys, 'key')} ({terminal.size(seen.key_bytes)}), "
        f"{terminal.count(seen.sessions, 'session')}, "
        f"{terminal.count(seen.watches, 'watch', 'watches')}, "
        f"{terminal.count(seen.records, 'record')} written"
    )


def _stage(seen: Overview) -> str:
    members = terminal.count(len(seen.members), "member")
    if seen.generation == 0:
        return "no generation yet" + (", one is forming" if seen.forming else "")
    if seen.finished:
        return f"finished in generation {seen.generation}"
    forming = ", the next one is forming" if seen.forming else ""
    return f"generation {seen.generation} of {members}{forming}"


def _say_members(members: Iterable[MemberState]) -> None:
    columns = (
        Column("SLOT", right=True),
        Column("NAME", fold=True),
        Column("STATE"),
        Column("STEP", right=True),
        Column("PHASE"),
        Column("SILENT", right=True),
        Column("SYNC"),
    )
    terminal.say_table(columns, [_cells(member) for member in members])


def _cells(member: MemberState) -> list[Cell]:
    gone = member.state == "vacant"
    return [
        str(member.slot),
        member.name or member.incarnation[:8] or "-",
        Styled(member.state, _STYLES.get(member.state, "")),
        "-" if member.step < 0 else str(member.step),
        member.phase or "-",
        "-" if gone else _seconds(member.silent_s),
        Styled("out of sync", "yellow") if member.out_of_sync else "yes",
    ]


def say_waits(seen: Overview, *, indent: int = 0) -> None:
    """The open waits, the longest first."""
    names = {member.slot: member.name for member in seen.members}
    columns = (
        Column("KIND"),
        Column("NAME", fold=True),
        Column("EPOCH", right=True),
        Column("FOR", right=True),
        Column("THERE", right=True),
        Column("MISSING", fold=True),
    )
    rows = [
        (
            wait.kind,
            wait.name,
            str(wait.epoch),
            _seconds(wait.for_s),
            f"{len(wait.present)} of {len(wait.present) + len(wait.missing)}",
            _missing(wait.missing, names),
        )
        for wait in _longest_first(seen)
    ]
    terminal.say_table(columns, rows, indent=indent)


def _longest_first(seen: Overview) -> list[Waiting]:
    return sorted(seen.waiting, key=lambda wait: -wait.for_s)


def _missing(slots: tuple[int, ...], names: Mapping[int, str]) -> str:
    """`3 (worker-3), 7 (worker-7)`; many as ranges: `3, 7-250`."""
    if len(slots) > _NAMES_SHOWN:
        return terminal.ranges(slots)
    named = (f"{slot} ({names[slot]})" if names.get(slot) else str(slot) for slot in sorted(slots))
    return ", ".join(named) or "-"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else terminal.age(seconds)


# ---- JSON


def as_json(seen: Overview) -> dict[str, Any]:
    """The state as one object."""
    return {
        "run": seen.run,
        "term": seen.term,
        "service": seen.service,
        "generation": seen.generation,
        "forming": seen.forming,
        "finished": seen.finished,
        "stop": seen.stop
        and {"stop": seen.stop.stop, "step": _number(seen.stop.step), "reason": seen.stop.reason},
        "members": [
            {
                "slot": member.slot,
                "name": member.name,
                "incarnation": member.incarnation,
                "state": member.state,
                "step": _number(member.step),
                "phase": member.phase,
                "silent_s": round(member.silent_s, 3),
                "out_of_sync": member.out_of_sync,
            }
            for member in seen.members
        ],
        "standbys": list(seen.standbys),
        "waiting": waits_json(seen),
        "keys": seen.keys,
        "key_bytes": seen.key_bytes,
        "sessions": seen.sessions,
        "watches": seen.watches,
        "records": seen.records,
    }


def waits_json(seen: Overview) -> list[dict[str, Any]]:
    """The open waits, the longest first."""
    return [
        {
            "kind": wait.kind,
            "name": wait.name,
            "epoch": wait.epoch,
            "for_s": round(wait.for_s, 3),
            "present": list(wait.present),
            "missing": list(wait.missing),
        }
        for wait in _longest_first(seen)
    ]


def _number(step: int) -> int | None:
    """A step; the protocol's -1 is none."""
    return None if step < 0 else step
