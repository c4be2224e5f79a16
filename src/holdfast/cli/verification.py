"""`holdfast ckpt verify`: every byte of a step against its checksums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint import step_manifest
from holdfast.cli import terminal
from holdfast.errors import FormatError, NoCheckpointError, StorageError
from holdfast.format import (
    MANIFEST,
    Manifest,
    Problem,
    SaveId,
    parse_file_name,
    step_folder,
    verify_step,
)
from holdfast.storage import Store

_NAMES_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification found in one step; `manifest` is None if it cannot be read."""

    step: int
    manifest: Manifest | None
    problems: tuple[Problem, ...]


def verdict(store: Store, step: int) -> Verdict:
    """Verify one step, with progress on stderr. Fails: NoCheckpointError if it is not there to the end."""
    try:
        manifest = step_manifest(store, step)
    except (FormatError, StorageError) as error:
        _check_there(store, step, None)
        return Verdict(step, None, (Problem(MANIFEST, None, (), error.message),))
    total = _data_bytes(store, manifest)
    with terminal.progress(f"verifying step {step}", total) as advance:
        problems = tuple(verify_step(store, step_folder(step), progress=advance))
    if problems:
        _check_there(store, step, manifest.save)
    return Verdict(step, manifest, problems)


def _check_there(store: Store, step: int, save: SaveId | None) -> None:
    """NoCheckpointError if a live run has removed a step meanwhile, or saved it again: that is no damage."""
    try:
        there = store.exists(step_folder(step), MANIFEST) and (
            save is None or step_manifest(store, step).save == save
        )
    except (FormatError, StorageError):
        return
    if not there:
        raise NoCheckpointError(
            f"step {step} was removed from {store.root} meanwhile",
            hint="holdfast ckpt ls shows what is there",
        )


def _data_bytes(store: Store, manifest: Manifest) -> int:
    """Bytes of the data files as they lie on disk, headers included."""
    folder, total = step_folder(manifest.save.step), 0
    for name in store.names(folder):
        parsed = parse_file_name(name)
        if parsed is not None and parsed.kind == "data" and parsed.attempt == manifest.save.attempt:
            total += store.size(folder, name) or 0
    return total


def say(found: Verdict) -> None:
    """The verdict for people."""
    if not found.problems and found.manifest is not None:
        manifest = found.manifest
        arrays = terminal.count(len(manifest.arrays), "array")
        parts = terminal.count(len(manifest.parts), "part")
        terminal.say(f"step {found.step}: ok ({terminal.size(manifest.nbytes)}, {arrays}, {parts})")
        return
    terminal.say(f"step {found.step}: {terminal.count(len(found.problems), 'problem')}")
    for problem in found.problems:
        block = "" if problem.block is None else f", block {problem.block}"
        terminal.say(f"  {problem.file}{block}")
        terminal.say(f"    {problem.message.removeprefix(f'{problem.file}: ')}")
        if problem.arrays:
            terminal.say(f"    arrays: {_names(problem.arrays)}")


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"{shown} and {more} more (--json lists all)" if more > 0 else shown


def as_json(store: Store, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The verdicts as one object."""
    return {
        "path": store.root,
        "ok": not any(found.problems for found in verdicts),
        "steps": [
            {
                "step": found.step,
                "ok": not found.problems,
                "bytes": found.manifest.nbytes if found.manifest is not None else None,
                "problems": [
                    {
                        "file": problem.file,
                        "block": problem.block,
                        "arrays": list(problem.arrays),
                        "message": problem.message,
                    }
                    for problem in found.problems
                ],
            }
            for found in verdicts
        ],
    }
