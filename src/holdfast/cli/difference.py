"""`holdfast ckpt diff`: where two steps differ, in structure and in values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import Any, Literal, NamedTuple

from holdfast.checkpoint import StepReader, step_manifest
from holdfast.cli import summary, terminal
from holdfast.cli.folder import Place, newest_or
from holdfast.cli.terminal import Column
from holdfast.cli.values import Tally, compared
from holdfast.format import ArrayEntry, Manifest
from holdfast.storage import Store

Status = Literal[
    "equal",  # read: every bit is the same
    "same save",  # not read: both sides have the same save id and digests
    "not compared",  # values were not asked for
    "values differ",
    "bits differ",  # only NaN payloads or the sign of zero
    "dtype",
    "shape",
    "kind",
    "only in a",
    "only in b",
]
_EQUAL: tuple[Status, ...] = ("equal", "same save", "not compared")


class Side(NamedTuple):
    """One of the two steps."""

    store: Store
    manifest: Manifest


class Change(NamedTuple):
    """Something small that differs, as JSON text; None where it is missing."""

    name: str
    a: str | None
    b: str | None


@dataclass(frozen=True, slots=True)
class ArrayVerdict:
    """How one array compares. `tally` is there if its values were read."""

    name: str
    status: Status
    a: ArrayEntry | None
    b: ArrayEntry | None
    tally: Tally | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """Everything in which two steps differ, and every array by name."""

    arrays: list[ArrayVerdict] = field(default_factory=list)
    scalars: list[Change] = field(default_factory=list)
    meta: list[Change] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether nothing was found to differ."""
        return not (self.scalars or self.meta or any(one.status not in _EQUAL for one in self.arrays))


def side(place: Place) -> Side:
    """The step that a place means. Fails: NoCheckpointError, FormatError."""
    return Side(place.store, step_manifest(place.store, newest_or(place)))


def difference(a: Side, b: Side, *, values: bool) -> Difference:
    """Where two steps differ. Reads array data only with `values`, and only where it could differ."""
    verdicts = structure(a.manifest, b.manifest)
    if values:
        verdicts = _with_values(a, b, verdicts)
    return Difference(
        [verdicts[name] for name in verdicts],
        list(_scalar_changes(a.manifest, b.manifest)),
        list(_changes(a.manifest.meta, b.manifest.meta, "")),
    )


def structure(a: Manifest, b: Manifest) -> dict[str, ArrayVerdict]:
    """Every array of either side, in the order of a, then b; values are left "not compared"."""
    ours = {entry.name: entry for entry in a.arrays}
    theirs = {entry.name: entry for entry in b.arrays}
    same = _same_parts(a, b)
    return {
        name: _structure(name, ours.get(name), theirs.get(name), same) for name in sorted({*ours, *theirs})
    }


def _structure(
    name: str, a: ArrayEntry | None, b: ArrayEntry | None, same: Callable[[ArrayEntry, ArrayEntry], bool]
) -> ArrayVerdict:
    status: Status
    if a is None or b is None:
        status = "only in b" if a is None else "only in a"
    elif (a.kind, a.impl) != (b.kind, b.impl):
        status = "kind"
    elif a.shape != b.shape:
        status = "shape"
    elif a.dtype != b.dtype:
        status = "dtype"
    else:
        status = "same save" if same(a, b) else "not compared"
    return ArrayVerdict(name, status, a, b)


def _same_parts(a: Manifest, b: Manifest) -> Callable[[ArrayEntry, ArrayEntry], bool]:
    """Whether two arrays are provably the same bytes.

    The digest of a part index covers the digests of all its data, which are seeded with the save id: within
    one save, equal index digests mean equal bytes. Whether the disk still holds them is for `verify` to say.
    """
    if a.save != b.save:
        return lambda one, two: False
    ours = {part.part: part.digest for part in a.parts}
    common = {part.part for part in b.parts if ours.get(part.part) == part.digest}
    return lambda one, two: one == two and common.issuperset(summary.parts(one))


def _with_values(a: Side, b: Side, verdicts: dict[str, ArrayVerdict]) -> dict[str, ArrayVerdict]:
    pairs = [(v.a, v.b) for v in verdicts.values() if v.status == "not compared" and v.a and v.b]
    readers = (StepReader(a.store, a.manifest), StepReader(b.store, b.manifest))
    # In the order of the file, not of the names: many small arrays share a block.
    pairs.sort(key=lambda pair: readers[0].first_byte(pair[0]))
    found = dict(verdicts)
    done = 0

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        advance(done)

    with terminal.progress("comparing", sum(entry.nbytes for entry, _ in pairs)) as advance:
        for one, two in pairs:
            tally = compared(readers, (one, two), progress=add)
            found[one.name] = ArrayVerdict(one.name, _value_status(tally), one, two, tally)
    return found


def _value_status(tally: Tally) -> Status:
    if tally.values_differ:
        return "values differ"
    return "bits differ" if tally.bits_differ else "equal"


def _scalar_changes(a: Manifest, b: Manifest) -> Iterator[Change]:
    ours = {entry.name: entry for entry in a.scalars}
    theirs = {entry.name: entry for entry in b.scalars}
    for name in sorted({*ours, *theirs}):
        one, two = ours.get(name), theirs.get(name)
        if one != two:
            texts = [None if entry is None else summary.scalar_text(entry) for entry in (one, two)]
            yield Change(name, *texts)


def _changes(a: Any, b: Any, path: str) -> Iterator[Change]:
    """Where two JSON values differ, by path; 1, 1.0 and true are different."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            below = f"{path}/{key}" if path else key
            if key not in a or key not in b:
                yield Change(below, _json_text(a, key), _json_text(b, key))
            else:
                yield from _changes(a[key], b[key], below)
    elif json.dumps(a, sort_keys=True) != json.dumps(b, sort_keys=True):
        yield Change(path, json.dumps(a), json.dumps(b))


def _json_text(holder: Mapping[str, Any], key: str) -> str | None:
    return json.dumps(holder[key]) if key in holder else None


# ---- for people


def say(a: Side, b: Side, found: Difference, *, values: bool) -> None:
    """The difference for people: what differs, then one line that sums it up."""
    for letter, one in (("a", a), ("b", b)):
        manifest = one.manifest
        when = terminal.moment(manifest.created)
        terminal.say(f"{letter}: {one.store.root} step {manifest.save.step} ({manifest.save}, {when} UTC)")
    structural = [one for one in found.arrays if one.tally is None and one.status not in _EQUAL]
    if structural:
        terminal.say("\nstructure")
        pairs = [(one.name, _structure_text(one)) for one in structural]
        terminal.say_table((Column("NAME", fold=True), Column("DIFFERENCE", fold=True)), pairs, indent=2)
    for title, changes in (("scalars", found.scalars), ("meta", found.meta)):
        if changes:
            terminal.say(f"\n{title}")
            columns = (Column("NAME", fold=True), Column("A", fold=True), Column("B", fold=True))
            rows = [(one.name, _shown(one.a), _shown(one.b)) for one in changes]
            terminal.say_table(columns, rows, indent=2)
    _say_values([one for one in found.arrays if one.status in ("values differ", "bits differ")])
    terminal.say(f"\n{_sum(found, values)}")


def _say_values(arrays: Sequence[ArrayVerdict]) -> None:
    if not arrays:
        return
    terminal.say("\nvalues")
    columns = (
        Column("NAME", fold=True),
        Column("DTYPE"),
        Column("ELEMENTS", right=True),
        Column("DIFFER", right=True),
        Column("MAX ABS DIFF", right=True),
        Column("NOTE", fold=True),
    )
    rows = []
    for one in arrays:
        tally = one.tally
        assert tally is not None
        assert one.a is not None
        most = "-" if tally.max_abs is None else f"{tally.max_abs:.6g}"
        rows.append(
            (
                one.name,
                summary.dtype_text(one.a),
                f"{tally.elements:,}",
                f"{tally.values_differ:,}",
                most,
                _note(tally),
            )
        )
    terminal.say_table(columns, rows, indent=2)


def _note(tally: Tally) -> str:
    notes = []
    if tally.nan_on_one_side:
        notes.append(f"{tally.nan_on_one_side:,} NaN on one side only")
    alike = tally.bits_differ - tally.values_differ
    if alike:
        notes.append(f"{alike:,} differ in bits alone (NaN payload or sign of zero)")
    return "; ".join(notes)


def _structure_text(one: ArrayVerdict) -> str:
    if one.a is None or one.b is None:
        return one.status
    word: Callable[[ArrayEntry], str] = {
        "shape": lambda entry: summary.shape_text(entry.shape),
        "dtype": lambda entry: entry.dtype,
        "kind": summary.dtype_text,
    }[one.status]
    return f"{one.status}: {word(one.a)} in a, {word(one.b)} in b"


def _shown(text: str | None) -> str:
    return "missing" if text is None else terminal.shorten(text, 60)


def _sum(found: Difference, values: bool) -> str:
    total = terminal.count(len(found.arrays), "array")
    same = sum(one.status in _EQUAL for one in found.arrays)
    unread = sum(one.status == "same save" for one in found.arrays)
    if not values:
        text = f"{same} of {total} alike in structure, values not compared"
    else:
        found_equal = f"{same - unread} of {total} bit-equal"
        not_read = f"{unread} of {total} of the same save with the same digests, not read"
        text = "; ".join([found_equal] * (same > unread or not unread) + [not_read] * bool(unread))
    if found.scalars:
        text += f"; {terminal.count(len(found.scalars), 'scalar')} changed"
    if found.meta:
        text += f"; {terminal.count(len(found.meta), 'metadata value')} changed"
    return f"{'equal' if found.equal else 'different'}: {text}"


# ---- for programs


def as_json(a: Side, b: Side, found: Difference, *, values: bool) -> dict[str, Any]:
    """The difference as one object."""
    return {
        "equal": found.equal,
        "values_compared": values,
        "a": _side_json(a),
        "b": _side_json(b),
        "arrays": [_array_json(one) for one in found.arrays],
        "scalars": [one._asdict() for one in found.scalars],
        "meta": [one._asdict() for one in found.meta],
    }


def _side_json(one: Side) -> dict[str, Any]:
    save = one.manifest.save
    return {
        "path": one.store.root,
        "step": save.step,
        "save": {"run": save.run, "step": save.step, "attempt": save.attempt},
        "created": terminal.iso(one.manifest.created),
    }


def _array_json(one: ArrayVerdict) -> dict[str, Any]:
    tally = one.tally
    return {
        "name": one.name,
        "status": one.status,
        "a": _entry_json(one.a),
        "b": _entry_json(one.b),
        "elements": prod(one.a.shape) if one.a is not None and one.b is not None else None,
        "bits_differ": tally.bits_differ if tally else None,
        "values_differ": tally.values_differ if tally else None,
        "nan_on_one_side": tally.nan_on_one_side if tally else None,
        "max_abs": _number_json(tally.max_abs) if tally else None,
    }


def _entry_json(entry: ArrayEntry | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    return {"dtype": entry.dtype, "shape": list(entry.shape), "kind": entry.kind, "impl": entry.impl}


def _number_json(value: float | int | None) -> float | int | str | None:
    """JSON has no infinity."""
    return value if value is None or isinstance(value, int) or isfinite(value) else str(value)
