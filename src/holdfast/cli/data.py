"""`holdfast data`: make token sets out of text, and look at them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.on_disk import FILE, OnDisk

if TYPE_CHECKING:
    from holdfast.train.data.inspection import Overview

_json = click.option("--json", "json_", is_flag=True, help="Print one JSON object instead of a table.")


@click.group()
def data() -> None:
    """Make token sets out of text, and look at them.

    A set is two files, PREFIX.bin and PREFIX.idx, as Megatron-LM has them, and
    a small PREFIX.json with what it was made with.
    """


@data.command()
@click.argument(
    "inputs",
    type=OnDisk("text is read from a disk; copy it there first", reads=True),
    nargs=-1,
    required=True,
    metavar="IN...",
)
@click.option(
    "--out",
    type=OnDisk("token sets are mapped into memory; build it on a disk, and copy the three files"),
    required=True,
    metavar="PREFIX",
    help="The set to write: PREFIX.bin, .idx and .json.",
)
@click.option(
    "--tokenizer",
    type=FILE,
    default="byte",
    show_default=True,
    metavar="NAME",
    help="byte, or the path of a tokenizer.json.",
)
@click.option(
    "--field",
    default="text",
    show_default=True,
    help="What of a JSON line is the text; dots go inside: data.body.",
)
@click.option(
    "--document",
    type=click.Choice(["file", "line", "paragraph"]),
    default="file",
    show_default=True,
    help="What of a text file is one document.",
)
@click.option("--eod", metavar="TOKEN", help="The token that ends a document, if it has an unusual name.")
@click.option("--no-eod", is_flag=True, help="Put no token between documents.")
@click.option("--force", is_flag=True, help="Replace a set of that name.")
@_json
def build(inputs: tuple[str, ...], out: str, force: bool, no_eod: bool, json_: bool, **options: Any) -> None:
    """Make the token set PREFIX from text and JSON lines.

    IN is a file or a folder. Files end in .txt, .text, .md, .jsonl or .ndjson,
    each also with .gz; those below a folder are taken in the order of their
    names. Nothing of the set is visible before all of it is.

    \b
    Example:
      holdfast data build corpus/ --out tokens/corpus
      holdfast train recipes.tiny data.sources='[{"path": "tokens/corpus"}]'
    """
    import os

    from holdfast.cli import terminal
    from holdfast.train.data import ingestion, inspection

    recipe = ingestion.Recipe(**options, with_eod=not no_eod)
    files = ingestion.input_files(inputs)
    total = sum(os.path.getsize(path) for path in files)
    with terminal.progress("reading", total) as advance:
        built = ingestion.build(files, out, recipe, replace=force, progress=advance)
    found = inspection.overview(out)
    if json_:
        terminal.say_json({**_as_json(found), "files": built.files, "empty": built.empty})
        return
    _say(found)
    terminal.note(f"made of {terminal.count(built.files, 'file')}, {terminal.size(total)}")
    if built.empty:
        terminal.note(f"left out: {terminal.count(built.empty, 'document')} without text")


@data.command()
@click.argument("prefix", type=OnDisk("token sets are mapped into memory; copy the three files to a disk"))
@click.option("--verify", is_flag=True, help="Read every token, and check it against the digests.")
@click.option(
    "--documents",
    "shown",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Show how the first N documents begin.",
)
@click.option("--tokenizer", type=FILE, metavar="PATH", help="The tokenizer.json to read them with.")
@_json
def show(prefix: str, verify: bool, shown: int, tokenizer: str | None, json_: bool) -> None:
    """Show what the token set PREFIX holds.

    builtin:tiny is the one that comes along. The index is checked as before a
    run. Exit code: 0 fine, 2 missing or damaged.
    """
    from holdfast.cli import terminal
    from holdfast.train.data import inspection

    for end in (".idx", ".bin"):
        prefix = prefix.removesuffix(end)
    found = inspection.overview(prefix)
    if verify:
        with terminal.progress("verifying", found.nbytes) as advance:
            inspection.verify(prefix, progress=advance)
    beginnings = inspection.beginnings(prefix, shown, tokenizer=tokenizer)
    if json_:
        told = [{"document": number, "text": text} for number, text in beginnings]
        terminal.say_json({**_as_json(found), "verified": verify, **({"beginnings": told} if shown else {})})
        return
    _say(found)
    if verify:
        terminal.say("verified     every token")
    for number, text in beginnings:
        terminal.say()
        terminal.say(f"document {number}: {text}")


def _as_json(found: Overview) -> dict[str, Any]:
    return found._asdict()


def _say(found: Overview) -> None:
    from holdfast.cli import terminal

    rows = [
        ("set", found.path),
        ("documents", f"{found.documents:,}"),
        ("tokens", f"{found.tokens:,} ({found.dtype}, {terminal.size(found.nbytes)})"),
        ("length", f"{found.shortest:,} to {found.longest:,}, median {found.median:,}"),
        ("tokenizer", found.tokenizer or "not said"),
        ("vocabulary", "not said" if found.vocab_size is None else f"{found.vocab_size:,}"),
        ("end token", "none" if found.eod is None else f"{found.eod}"),
        ("digest", found.fingerprint),
    ]
    for name, value in rows:
        terminal.say(f"{name:<12} {value}")
