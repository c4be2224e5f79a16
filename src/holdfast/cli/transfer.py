"""`holdfast transfer`: the commands. Each parses, calls and prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from holdfast.cli.on_disk import FILE, Anywhere

_Command = TypeVar("_Command", bound=Callable[..., Any])

_json = click.option("--json", "json_", is_flag=True, help="Print one JSON object.")
_token_file = click.option(
    "--token-file",
    type=FILE,
    metavar="FILE",
    envvar="HOLDFAST_TOKEN_FILE",
    help="The run's token. [default: HOLDFAST_TOKEN_FILE]",
)
_run = click.option(
    "--run",
    metavar="RUN",
    envvar="HOLDFAST_RUN",
    default="run",
    help="The run that both belong to. [default: HOLDFAST_RUN, else 'run']",
)


def _belonging(command: _Command) -> _Command:
    """The options that say who may talk to whom."""
    return _run(_token_file(command))


@click.group()
def transfer() -> None:
    """Move trees of arrays between processes, by hand.

    \b
    On one machine, say:
      holdfast transfer serve runs/a/ckpt --name policy
      holdfast transfer pull tcp://127.0.0.1:40123 policy --to policy.safetensors
    """


@transfer.command()
@click.argument("path", type=Anywhere(reads=True))
@click.option(
    "--name", metavar="NAME", help="What to publish it as. [default: the name of the file or folder]"
)
@click.option(
    "--version", type=click.IntRange(min=0), metavar="N", help="[default: the step of a checkpoint, else 0]"
)
@click.option(
    "--bind", metavar="ADDRESS", default="127.0.0.1:0", help="Where to listen. [default: 127.0.0.1:0]"
)
@_belonging
@_json
def serve(
    path: str, name: str | None, version: int | None, bind: str, run: str, token_file: str | None, json_: bool
) -> None:
    """Publish PATH until SIGTERM or Ctrl-C.

    PATH is a checkpoint folder (PATH@STEP; default: its newest step), an .npz or
    a .safetensors file. All of it is read into memory first, checkpoints verified.

    Says on stdout where it is served, and on stderr who took it. To be reached
    from other machines: --bind 0.0.0.0:4711 --token-file FILE.
    """
    from holdfast.cli import movement

    tree = movement.loaded(path)
    offer = movement.Offer(
        tree.tree,
        name=name if name is not None else tree.name,
        version=version if version is not None else tree.version,
    )
    movement.serve(offer, bind=bind, run=run, token_file=token_file, json_=json_)


@transfer.command()
@click.argument("addresses", metavar="ADDRESS...", nargs=-1, required=True)
@click.argument("name")
@click.option("--to", "file", type=FILE, metavar="FILE", help="A new .npz or .safetensors file for it.")
@click.option(
    "--version", type=click.IntRange(min=0), metavar="N", help="Wait for this one. [default: the newest]"
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0.1),
    default=600.0,
    metavar="SECONDS",
    help="For all of it. [default: 600]",
)
@_belonging
@_json
def pull(
    addresses: tuple[str, ...], name: str, file: str | None, version: int | None, timeout_s: float,
    run: str, token_file: str | None, json_: bool,
) -> None:  # fmt: skip
    """Fetch NAME from the process at ADDRESS, verify it, and say how it went.

    Several addresses are processes that hold slices of the same tree. Without
    --to nothing is kept.
    """
    from holdfast.cli import movement

    movement.pull(
        addresses,
        name,
        version=version,
        file=file,
        timeout_s=timeout_s,
        run=run,
        token_file=token_file,
        json_=json_,
    )


@transfer.command()
@click.option(
    "--mib",
    type=click.IntRange(1, 1 << 20),
    default=256,
    metavar="N",
    help="Size of the tree. [default: 256]",
)
@click.option(
    "--arrays", type=click.IntRange(1, 100_000), default=1, metavar="N", help="Arrays in it. [default: 1]"
)
@click.option("--rounds", type=click.IntRange(1, 1000), default=5, metavar="N", help="[default: 5]")
@_json
def bench(mib: int, arrays: int, rounds: int, json_: bool) -> None:
    """Move a tree between two processes of this machine, by every transport.

    A self-test that takes seconds: it shows what this machine can do, and that
    what arrives is what was sent. The first run of each prepares memory and does
    not count. `python -m bench transfer` compares with others.
    """
    from holdfast.cli import selftest

    selftest.run(nbytes=mib << 20, num_arrays=arrays, rounds=rounds, json_=json_)
