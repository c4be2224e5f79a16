"""`holdfast ckpt import` and `export`: checkpoints of other libraries, in and out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from holdfast.cli.on_disk import Anywhere, OnDisk

if TYPE_CHECKING:
    from holdfast.checkpoint.foreign import MoveReport

_SHOWN: Final = 20

_STEP = click.IntRange(min=0)
_json = click.option("--json", "json_", is_flag=True, help="Print one JSON object instead of a summary.")
_arrays = click.option(
    "--arrays",
    "patterns",
    metavar="PATTERN",
    multiple=True,
    help="Move only what matches: 'params', '**/bias'. May be repeated.",
)
_map = click.option(
    "--map",
    "rules",
    metavar="OLD=NEW",
    multiple=True,
    help="Rename: 'model=params', 'layers/*/w=blocks/*/kernel'. May be repeated; the first that fits counts.",
)
_memory = click.option(
    "--memory", metavar="SIZE", default="1GiB", show_default=True, help="Memory to take at most."
)


@click.command("import")
@click.argument(
    "source", type=OnDisk("copy the checkpoint to a local disk first, then import it", reads=True)
)
@click.argument("target", type=Anywhere())
@click.option(
    "--step", type=_STEP, help="Which step of SOURCE (default: its newest), or the number to give it."
)
@click.option("--item", metavar="NAME", help="Which item of an Orbax step (default: all).")
@_arrays
@_map
@click.option("--overwrite", is_flag=True, help="Replace a step that is there.")
@click.option(
    "--check-source/--no-check-source",
    default=True,
    help="Compare torch tensors with the CRC-32 saved with them. [default: on]",
)
@_memory
@_json
def import_step(
    source: str,
    target: str,
    step: int | None,
    item: str | None,
    patterns: tuple[str, ...],
    rules: tuple[str, ...],
    overwrite: bool,
    check_source: bool,
    memory: str,
    json_: bool,
) -> None:
    """Bring a checkpoint of Orbax or torch (DCP) into TARGET.

    SOURCE is an Orbax checkpoint, a step or the folder of a CheckpointManager;
    or a folder that torch.distributed.checkpoint saved, or one of such steps.
    torch and Orbax need not be installed; nothing is unpickled.

    Names are paths in the tree, joined by '/'. Every array is read back and
    compared before the step is committed; until then nothing of it is visible,
    and the command can be run again. What was renamed or left out is listed.

    \b
    Examples:
      holdfast ckpt import runs/old/checkpoints runs/new/ckpt
      holdfast ckpt import dcp/step-500 runs/new/ckpt --map model=params
    """
    from holdfast.checkpoint.foreign import import_checkpoint, parsed_rules
    from holdfast.cli.sums import size_in_bytes

    with _progress(f"importing {source}") as progress:
        report = import_checkpoint(
            source,
            target,
            step=step,
            arrays=patterns or None,
            rename=parsed_rules(rules) if rules else None,
            item=item,
            overwrite=overwrite,
            check_source=check_source,
            memory_limit=int(size_in_bytes(memory)),
            progress=progress,
        )
    _note_unused(rules, report)
    _say(report, json_)


@click.command("export")
@click.argument("source", type=Anywhere())
@click.argument("target", type=OnDisk("export to a local disk, then copy the folder"))
@click.option(
    "--format",
    "format_",
    type=click.Choice(["orbax"]),
    default="orbax",
    show_default=True,
    help="Whose format to write.",
)
@click.option("--step", type=_STEP, help="Which step of SOURCE (default: its newest).")
@_arrays
@_map
@click.option(
    "--empty",
    metavar="NAME",
    multiple=True,
    help="A node without values, such as optax's EmptyState: 'opt/1'. May be repeated.",
)
@_memory
@_json
def export_step(
    source: str,
    target: str,
    format_: str,
    step: int | None,
    patterns: tuple[str, ...],
    rules: tuple[str, ...],
    empty: tuple[str, ...],
    memory: str,
    json_: bool,
) -> None:
    """Write a step of SOURCE to the new folder TARGET, for Orbax.

    SOURCE is PATH or PATH@STEP. TARGET is what StandardCheckpointer().restore
    takes; for a CheckpointManager, give ROOT/STEP/default. It appears when
    every array has been read back and is equal.

    \b
    Example:
      holdfast ckpt export runs/a@1200 exported
    """
    from holdfast.checkpoint.foreign import export_orbax, parsed_rules
    from holdfast.cli import folder
    from holdfast.cli.sums import size_in_bytes

    place = folder.placed(source, step)
    with _progress(f"exporting {source}") as progress:
        report = export_orbax(
            place.store.root,
            target,
            step=folder.newest_or(place),
            arrays=patterns or None,
            rename=parsed_rules(rules) if rules else None,
            empty=empty,
            memory_limit=int(size_in_bytes(memory)),
            progress=progress,
        )
    _note_unused(rules, report)
    _say(report, json_)


@contextmanager
def _progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Progress whose total is known once the work has begun."""
    from holdfast.cli import terminal

    with ExitStack() as stack:
        advance: list[terminal.Progress] = []

        def told(done: int, total: int) -> None:
            if not advance:
                advance.append(stack.enter_context(terminal.progress(label, total)))
            advance[0](done)

        yield told


def _note_unused(rules: Sequence[str], report: MoveReport) -> None:
    """Say which rules renamed nothing: a misspelt name leaves everything as it was."""
    from holdfast.checkpoint.foreign import parsed_rules
    from holdfast.checkpoint.foreign.renaming import renaming
    from holdfast.cli import terminal

    for old, new in parsed_rules(rules).items():
        rule = renaming({old: new})
        if not any(rule(one.path) == one.name for one in report.renamed):
            terminal.note(f"--map {old}={new} renamed nothing")


def _say(report: MoveReport, json_: bool) -> None:
    from holdfast.cli import terminal

    if json_:
        terminal.say_json(_as_json(report))
        return
    what = terminal.count(len(report.arrays), "array")
    if report.scalars:
        what += f" and {terminal.count(len(report.scalars), 'scalar')}"
    nbytes = terminal.size(report.nbytes)
    terminal.say(f"step {report.step}: {what} ({nbytes}) moved and read back, all equal")
    terminal.say(f"  format  {report.format}")
    terminal.say(f"  from    {report.source}")
    terminal.say(f"  to      {report.target}")
    _list("renamed", [f"{one.path} -> {one.name}" for one in report.renamed])
    _list("skipped", [f"{one.name}: {one.reason}" for one in report.skipped])


def _list(title: str, lines: Sequence[str]) -> None:
    from holdfast.cli import terminal

    if lines:
        terminal.say(f"{title} {len(lines):,}:")
    for line in lines[:_SHOWN]:
        terminal.say(f"  {line}")
    if len(lines) > _SHOWN:
        terminal.say(f"  and {len(lines) - _SHOWN:,} more (--json lists all)")


def _as_json(report: MoveReport) -> dict[str, Any]:
    return {
        "source": report.source,
        "target": report.target,
        "format": report.format,
        "step": report.step,
        "bytes": report.nbytes,
        "seconds": report.seconds,
        "arrays": [
            {
                "name": one.name,
                "source_name": one.source_name,
                "dtype": one.dtype,
                "shape": list(one.shape),
                "bytes": one.nbytes,
                "xxh3_128": one.digest,
            }
            for one in report.arrays
        ],
        "scalars": list(report.scalars),
        "renamed": [{"path": one.path, "name": one.name} for one in report.renamed],
        "skipped": [{"name": one.name, "reason": one.reason} for one in report.skipped],
    }
