"""`holdfast hub`: look at Hugging Face repositories, see whether they fit, and make them of checkpoints."""

from __future__ import annotations

import difflib
import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from holdfast.cli.on_disk import FILE, Anywhere
from holdfast.cli.settings import SettingsCommand

if TYPE_CHECKING:
    from holdfast.checkpoint.hub import NameMap, Repository
    from holdfast.train.model.config import ModelConfig

_STEP = click.IntRange(min=0)
_json = click.option("--json", "json_", is_flag=True, help="Print one JSON object instead of a table.")
_GIB: Final = 1 << 30


@click.group()
def hub() -> None:
    """Look at Hugging Face repositories, and make them.

    PLACE is a folder with model.safetensors, or with several files and their
    index; a snapshot in a Hugging Face cache; one .safetensors file; or the
    URL of one of these in an object store.
    """


@hub.command()
@click.argument("place", type=Anywhere(reads=True))
@click.option(
    "--tensors",
    "patterns",
    metavar="PATTERN",
    multiple=True,
    help="Show only tensors whose name matches: '*.q_proj.weight'. May be repeated.",
)
@_json
def show(place: str, patterns: tuple[str, ...], json_: bool) -> None:
    """Show the tensors in PLACE. Reads headers alone."""
    from holdfast.checkpoint.hub import Repository
    from holdfast.cli import terminal

    found = Repository(place)
    chosen = {
        name: entry
        for name, entry in found.tensors.items()
        if not patterns or any(fnmatch.fnmatchcase(name, one) for one in patterns)
    }
    if json_:
        tensors = [
            {"name": name, "dtype": one.tensor.dtype, "shape": list(one.tensor.shape), "bytes": one.nbytes,
             "file": one.file}
            for name, one in chosen.items()
        ]  # fmt: skip
        terminal.say_json({"place": found.place, "bytes": found.nbytes, "tensors": tensors})
        return
    columns = (
        terminal.Column("NAME", fold=True),
        terminal.Column("DTYPE"),
        terminal.Column("SHAPE"),
        terminal.Column("BYTES", right=True),
        terminal.Column("FILE"),
    )
    rows = [
        (name, one.tensor.dtype, str(list(one.tensor.shape)), f"{one.nbytes:,}", one.file)
        for name, one in chosen.items()
    ]
    if rows:
        terminal.say_table(columns, rows)
    else:
        terminal.note(f"no tensor matches {', '.join(patterns)}")
    terminal.note(_summary(found))


def _summary(found: Repository) -> str:
    from holdfast.cli import terminal

    tensors, files = len(found.tensors), len(found.files)
    dtypes = ", ".join(sorted({entry.tensor.dtype for entry in found.tensors.values()}))
    return (
        f"{terminal.count(tensors, 'tensor')} ({dtypes}), {terminal.size(found.nbytes)} in "
        f"{terminal.count(files, 'file')}"
    )


@hub.command(cls=SettingsCommand)
@click.argument("place", type=Anywhere(reads=True))
@click.argument("recipe", required=False)
@click.argument("settings", nargs=-1, metavar="[SETTING=VALUE]...")
@click.option("--verify", is_flag=True, help="Also read files whose SHA-256 is known, and compare it.")
@_json
@click.pass_context
def check(
    context: click.Context,
    place: str,
    recipe: str | None,
    settings: tuple[str, ...],
    verify: bool,
    json_: bool,
) -> None:
    """Say whether PLACE is whole, and fits RECIPE's model.

    Headers, offsets, sizes and the index are checked; with a recipe also each
    tensor against the parameter that it fills, as `holdfast train RECIPE
    --init-from PLACE` would do. Nothing is loaded. Only a Hugging Face cache
    knows checksums of its files: --verify reads and compares them.

    Exit code: 0 fine, 1 problems found, 2 error.
    """
    from holdfast.checkpoint.hub import Repository
    from holdfast.cli import terminal
    from holdfast.errors import FormatError

    problems: list[str] = []
    found: Repository | None = None
    try:
        found = Repository(place)
    except FormatError as error:
        problems.append(error.message)
    if found is not None:
        if recipe is not None:
            problems += _fit(place, found, recipe, settings)
        if verify:
            with terminal.progress(f"verifying {place}", found.nbytes) as told:
                problems += found.damaged(told)
            if not found.num_verifiable:
                terminal.note("no file here has a known SHA-256; only those of a Hugging Face cache do")
    if json_:
        terminal.say_json({"place": place, "ok": not problems, "problems": problems})
    else:
        terminal.say(f"{place}: {terminal.count(len(problems), 'problem') if problems else 'ok'}")
        for problem in problems:
            terminal.say(f"  {problem}")
        if found is not None:
            terminal.note(_summary(found))
    context.exit(int(bool(problems)))


def _fit(place: str, found: Repository, recipe: str, settings: tuple[str, ...]) -> list[str]:
    """What keeps the weights from filling the parameters of a recipe's model."""
    from holdfast.checkpoint.hub import Matched
    from holdfast.cli.train import needs_jax
    from holdfast.errors import MismatchError, UsageError
    from holdfast.recipes import resolve
    from holdfast.train.model.hub import check_weights
    from holdfast.train.model.hub_names import decoder_map

    config = resolve(recipe, settings).model
    needs_jax()
    try:
        check_weights(place, config)
    except UsageError as error:
        return [f"{error.message}: {error.hint}"]
    try:
        Matched(found, config.build().shapes(), decoder_map(config), cast=True, strict=True, rank=0, world=1)
    except MismatchError as error:
        return list(error.problems)
    return []


@hub.command()
@click.argument("source", type=Anywhere())
@click.argument("folder", type=Anywhere())
@click.option("--step", type=_STEP, help="Which step of SOURCE (default: its newest).")
@click.option("--dtype", metavar="DTYPE", help="Convert all values, such as to bfloat16 (or bf16).")
@click.option(
    "--mapping",
    "file",
    type=FILE,
    metavar="FILE.json",
    help="Rules for a checkpoint that `holdfast train` did not make.",
)
@click.option("--part", default="params", show_default=True, help="With --mapping: the branch of the tree.")
@click.option("--shard-gib", default=5.0, show_default=True, help="The most GiB of tensors in one file.")
@_json
def export(
    source: str,
    folder: str,
    step: int | None,
    dtype: str | None,
    file: str | None,
    part: str,
    shard_gib: float,
    json_: bool,
) -> None:
    """Write the weights of SOURCE as a repository in FOLDER.

    SOURCE is the folder of a run of `holdfast train`, whose model makes the
    names and config.json; or, with --mapping, any checkpoint folder; each
    also as SOURCE@STEP. Every block that is read is verified. FOLDER appears
    when all of it is written.

    \b
    Examples:
      holdfast hub export runs/tiny exported --dtype bfloat16
      holdfast hub export runs/x/ckpt@1200 exported --mapping names.json
    """
    from holdfast.cli import terminal
    from holdfast.cli.folder import newest_or, placed

    place = placed(source, step)
    chosen = newest_or(place)
    root = place.store.root
    with terminal.progress(f"exporting step {chosen}", _nbytes(place.store, chosen, part)) as told:
        options: dict[str, Any] = {
            "step": chosen, "dtype": _dtype(dtype), "shard_bytes": int(shard_gib * _GIB), "progress": told
        }  # fmt: skip
        if file is not None:
            from holdfast.checkpoint.hub import export_hub

            export_hub(folder, root, _rules(file), part=part, **options)
        else:
            from holdfast.train.model.hub import export_model

            export_model(folder, root, _model(root), **options)
    if json_:
        terminal.say_json({"source": root, "step": chosen, "folder": folder})
    else:
        terminal.note(f"step {chosen} of {root} is in {folder}")


def _dtype(text: str | None) -> str | None:
    """The dtype of a name or of a word as in `hub show`: `bfloat16`, `BF16`, `fp16`. Fails: UsageError."""
    from holdfast.arrays import TABLE
    from holdfast.errors import UsageError

    words = {entry.stored.lower(): name for name, entry in TABLE.items() if entry.native}
    asked = (text or "").lower()
    if not asked:
        return None
    for name in (asked, words.get(asked), words.get(asked.replace("fp", "f", 1))):
        if name in TABLE:
            return name
    close = difflib.get_close_matches(asked, TABLE, n=1)
    hint = f"did you mean {close[0]}?" if close else "such as bfloat16, float16 or float32"
    raise UsageError(f"--dtype {text}: there is no such dtype", hint=hint)


def _nbytes(store: Any, step: int, part: str) -> int:
    from holdfast.arrays import match
    from holdfast.checkpoint import step_manifest

    return sum(one.nbytes for one in step_manifest(store, step).arrays if not part or match(part, one.name))


def _rules(file: str) -> NameMap:
    from holdfast.checkpoint.hub import NameMap
    from holdfast.errors import MissingPathError

    try:
        return NameMap.from_json(Path(file).read_bytes())
    except FileNotFoundError:
        raise MissingPathError(f"there is no {file}", path=file, hint="write the rules there") from None


def _model(root: str) -> ModelConfig:
    """The model of the run whose checkpoints are in `root`."""
    from holdfast.errors import UsageError
    from holdfast.train import TrainConfig

    for folder in (Path(root).parent, Path(root)):
        path = folder / "config.json"
        if path.is_file():
            return TrainConfig.from_json(path.read_bytes()).model
    raise UsageError(
        f"{root} has no config.json of a run beside it, so the names of its tensors are not known",
        hint="give the folder of a run of holdfast train, or --mapping FILE.json",
    )
