"""`holdfast ckpt`: the commands. Each parses, calls and prints; the work is in a module of its own."""

from __future__ import annotations

import click

from holdfast.cli.on_disk import Anywhere
from holdfast.clock import REAL, Clock

_STEP = click.IntRange(min=0)
_PLACE = Anywhere()
_json = click.option("--json", "json_", is_flag=True, help="Print one JSON object instead of a table.")


@click.group()
def ckpt() -> None:
    """Look at, verify, compare, prune and move checkpoints.

    PATH is a checkpoint folder, the one that holds step-00001200 and so on; the
    folder of a run, which has one; or such a place in an object store, as
    s3://bucket/run.
    """


def _now(context: click.Context) -> float:
    """Wall time; the context's object is the clock where one was given."""
    clock: Clock = context.obj or REAL
    return clock.wall()


@ckpt.command("ls")
@click.argument("path", type=_PLACE)
@_json
@click.pass_context
def list_steps(context: click.Context, path: str, json_: bool) -> None:
    """List the steps in PATH, oldest first.

    A step is committed, unreadable (its manifest is damaged or from a newer
    Holdfast), being written by a live run, or uncommitted: left by a save that
    never finished. Where the folder has a mirror, WHERE says which of the two has
    the step.
    """
    from holdfast.checkpoint import whereabouts
    from holdfast.cli import folder, listing, terminal

    store = folder.opened_root(path)
    where = whereabouts(store)
    rows = listing.mirrored(store, listing.rows(store), where)
    if json_:
        terminal.say_json(listing.as_json(store, rows))
    elif rows:
        listing.say(rows, now=_now(context), root=store.root, where=where)
    else:
        terminal.note(f"no steps in {store.root}")
        terminal.note(f"\nhint: {folder.NO_STEPS_HINT}")


@ckpt.command()
@click.argument("path", type=_PLACE)
@click.argument("step", type=_STEP, required=False)
@click.option(
    "--arrays",
    "patterns",
    metavar="PATTERN",
    multiple=True,
    help="Show only arrays whose name matches: 'params', '**/bias', 'layers/*/w'. May be repeated.",
)
@_json
@click.pass_context
def show(context: click.Context, path: str, step: int | None, patterns: tuple[str, ...], json_: bool) -> None:
    """Show what STEP in PATH holds (default: the newest).

    Reads the manifest alone: save id, versions of the writer, metadata, scalars
    and arrays. GRID says into how many pieces each dimension is cut, PARTS which
    part files hold them.
    """
    from holdfast.checkpoint import step_info, step_manifest
    from holdfast.cli import folder, summary, terminal

    place = folder.placed(path, step)
    chosen = folder.newest_or(place)
    manifest = step_manifest(place.store, chosen)
    pinned = step_info(place.store, chosen).pinned
    arrays = summary.selected(manifest, patterns)
    if json_:
        terminal.say_json(summary.as_json(place.store, manifest, arrays, pinned=pinned))
    else:
        summary.say(manifest, arrays, pinned=pinned, now=_now(context))
    if patterns and not arrays:
        terminal.note(f"no array matches {', '.join(patterns)}")


@ckpt.command()
@click.argument("path", type=_PLACE)
@click.argument("step", type=_STEP, required=False)
@click.option("--all", "all_", is_flag=True, help="Verify every step in PATH.")
@_json
@click.pass_context
def verify(context: click.Context, path: str, step: int | None, all_: bool, json_: bool) -> None:
    """Check every byte of STEP in PATH (default: the newest).

    Names file, block and arrays of everything that is damaged, missing or from
    another save. With --all, a step that a live run removes meanwhile is left out.

    Exit code: 0 whole and verified, 1 problems found, 2 error.
    """
    from holdfast.checkpoint import committed_steps
    from holdfast.cli import folder, terminal, verification
    from holdfast.errors import NoCheckpointError

    place = folder.placed(path, step)
    if all_ and place.step is not None:
        raise click.UsageError("--all and a step exclude each other", context)
    newest = folder.newest_or(place)
    verdicts = []
    for number in committed_steps(place.store) if all_ else [newest]:
        try:
            verdicts.append(verification.verdict(place.store, number))
        except NoCheckpointError:
            if not all_:
                raise
            terminal.note(f"step {number} was removed meanwhile")
            continue
        if not json_:
            verification.say(verdicts[-1])
    if json_:
        terminal.say_json(verification.as_json(place.store, verdicts))
    context.exit(int(any(found.problems for found in verdicts)))


@ckpt.command()
@click.argument("a", type=_PLACE)
@click.argument("b", type=_PLACE)
@click.option("--step-a", type=_STEP, help="Step of A (default: its newest).")
@click.option("--step-b", type=_STEP, help="Step of B (default: its newest).")
@click.option(
    "--values/--no-values", default=True, help="Compare values too, not structure alone. [default: on]"
)
@_json
@click.pass_context
def diff(
    context: click.Context,
    a: str,
    b: str,
    step_a: int | None,
    step_b: int | None,
    values: bool,
    json_: bool,
) -> None:
    """Compare two steps; A and B are PATH or PATH@STEP.

    Finds arrays, scalars and metadata that are missing or changed, and compares
    values bit by bit: how many elements differ and by how much. NaN equals NaN;
    sharding does not matter. Everything read is verified; what has the same save
    id and digests on both sides is not read.

    Exit code: 0 equal, 1 different, 2 error.
    """
    from holdfast.cli import difference, folder, terminal

    one = difference.side(folder.placed(a, step_a))
    two = difference.side(folder.placed(b, step_b))
    found = difference.difference(one, two, values=values)
    if json_:
        terminal.say_json(difference.as_json(one, two, found, values=values))
    else:
        difference.say(one, two, found, values=values)
    context.exit(int(not found.equal))


@ckpt.command()
@click.argument("path", type=_PLACE)
@click.option("--keep", required=True, metavar="POLICY", help="Which steps stay; see above.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed; remove nothing.")
@_json
@click.pass_context
def prune(context: click.Context, path: str, keep: str, dry_run: bool, json_: bool) -> None:
    """Remove the steps in PATH that POLICY does not keep.

    A policy joins rules with |. A step stays if any rule keeps it; the newest
    step and pinned ones always stay.

    \b
      latest(3)                  the newest 3
      every(1000)                one at or after each multiple of 1000 steps
      every(65536, unit="samples")
      best(2, "loss")            the 2 lowest of a metric in the metadata
      best(2, "accuracy", highest=True)
      within(86400)              those of the last 86,400 seconds
      within(604800, spacing_s=3600)
      everything()

    \b
    Example:
      holdfast ckpt prune runs/a/ckpt --keep 'latest(3) | every(1000)' --dry-run

    Refused while a live run writes to PATH, unless with --dry-run.
    """
    from contextlib import nullcontext

    from holdfast.cli import folder, policy_text, pruning, terminal

    rules = policy_text.parsed(keep)
    store = folder.opened_root(path)
    now = _now(context)
    with nullcontext() if dry_run else pruning.quiet_folder(store):
        found = pruning.decisions(store, rules, now=now)
        if not json_:
            pruning.say(found, now=now, dry_run=dry_run)
        if not dry_run:
            pruning.remove(store, [one.step for one in found if one.remove])
    if json_:
        terminal.say_json(pruning.as_json(store, found, rules, dry_run))
