"""`holdfast coordinator` and `holdfast coord`: the commands. Each parses, calls and prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

import click

from holdfast.cli.on_disk import FILE, OnDisk

if TYPE_CHECKING:
    from holdfast.coord import CoordClient

_Command = TypeVar("_Command", bound=Callable[..., Any])

_json = click.option("--json", "json_", is_flag=True, help="Print one JSON object instead of a table.")
_timeout = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0.1),
    default=10.0,
    metavar="SECONDS",
    help="How long to wait for an answer. [default: 10]",
)
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
    help="The run it serves. [default: HOLDFAST_RUN, else 'run']",
)
_coordinator = click.option(
    "--coordinator",
    "addresses",
    metavar="ADDRESS",
    multiple=True,
    envvar="HOLDFAST_COORD",
    help="Where it is; may be repeated. [default: HOLDFAST_COORD]",
)


def _reaching(command: _Command) -> _Command:
    """The options that say which coordinator is meant."""
    return _coordinator(_run(_token_file(_timeout(command))))


# ---- serving

_HELP: Final = {
    "run": "The name of the run.",
    "min_size": "Fewest members of a generation.",
    "max_size": "Most members of a generation.",
    "divisible_by": "The number of members is a multiple of this.",
    "shrink_only": "Nobody new after the first generation.",
    "rejoin": "A restarted member takes its slot back in the running generation.",
    "num_lanes": "Lanes that are spread over the members.",
    "last_call_s": "Wait for more once enough have joined.",
    "recall_s": "The same, at most, once there has been a generation.",
    "straggler_s": "Wait for members of the last generation.",
    "heartbeat_s": "How often members give a sign of life.",
    "suspect_s": "Silence after which a member is suspect.",
    "dead_s": "Silence after which a member is dead.",
}


@final
class _Serving(click.Command):
    """A command whose options include every field of Settings; they are looked up only when it is used."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *_settings_options()]


def _settings_options() -> list[click.Option]:
    from holdfast.coord import Settings

    kinds = {"int": int, "float": float, "str": str, "bool": bool}
    options = []
    for field in fields(Settings):
        name = f"--{field.name.replace('_', '-')}"
        default = "off" if field.default is False else "on" if field.default is True else field.default
        text = f"{_HELP.get(field.name, '')} [default: {default}]".strip()
        declared = f"{name}/--no{name[1:]}" if field.type == "bool" else name
        options.append(
            click.Option([declared], type=kinds[str(field.type)], default=None, help=text, metavar=None)
        )
    return options


@click.command(cls=_Serving)
@click.option(
    "--folder",
    type=OnDisk("its log, token and address are files; name a folder of this machine"),
    required=True,
    metavar="FOLDER",
    help="Where it keeps its log, token and address.",
)
@click.option(
    "--bind", metavar="ADDRESS", multiple=True, help="tcp://HOST:PORT or unix:/path; may be repeated."
)
@click.option("--discovery", type=FILE, metavar="FILE", help="Says where it is. [default: FOLDER/address]")
@click.option(
    "--token-file",
    type=FILE,
    metavar="FILE",
    help="The run's token. [default: FOLDER/token, made if absent]",
)
@click.option("--no-token", is_flag=True, help="Let in whoever reaches it; loopback and Unix sockets only.")
@click.option("--journal", type=FILE, metavar="FOLDER", help="The journal of the run.")
@click.option("--json", "json_", is_flag=True, help="Say where it is as one JSON object.")
@click.pass_context
def coordinator(
    context: click.Context,
    /,
    folder: str,
    bind: tuple[str, ...],
    discovery: str | None,
    token_file: str | None,
    no_token: bool,
    journal: str | None,
    json_: bool,
    **given: Any,
) -> None:
    """Serve the coordinator of a run until SIGTERM or Ctrl-C.

    Started again in the same FOLDER it goes on where it ended, in whatever way
    it ended; its clients come back by themselves.

    \b
      holdfast coordinator --folder runs/a/coord --min-size 4
      holdfast coord status --coordinator file:$PWD/runs/a/coord/address \\
                            --token-file runs/a/coord/token
    """
    from holdfast.cli import coordinator as serving
    from holdfast.cli import terminal
    from holdfast.coord import Settings

    if no_token and token_file is not None:
        raise click.UsageError("--token-file and --no-token exclude each other", context)
    settings = Settings(**{name: value for name, value in given.items() if value is not None})
    place = serving.placed(
        folder, bind=bind, discovery=discovery, token_file=token_file, no_token=no_token, journal=journal
    )

    def ready(addresses: tuple[str, ...]) -> None:
        if json_:
            terminal.say_json({"ready": list(addresses), "pid": os.getpid()}, indent=None)
        else:
            terminal.say(f"serving run {settings.run} at {', '.join(addresses)}")
        sys.stdout.flush()

    serving.run(place, settings, make_token=token_file is None, ready=ready)


# ---- looking


@click.group()
def coord() -> None:
    """Look at the coordinator of a run: members, waits and keys.

    \b
    Which one:  --coordinator tcp://HOST:PORT, unix:/path or file:/path,
                or HOLDFAST_COORD
    As whom:    --token-file FILE, or HOLDFAST_TOKEN_FILE

    Nobody takes part in the run by looking at it.
    """


def _reached(addresses: tuple[str, ...], run: str, token_file: str | None, timeout_s: float) -> CoordClient:
    from holdfast.cli import coordinator as reaching

    return reaching.reached(addresses, run=run, token_file=token_file, timeout_s=timeout_s)


@coord.command()
@_reaching
@_json
def status(
    addresses: tuple[str, ...], run: str, token_file: str | None, timeout_s: float, json_: bool
) -> None:
    """Show who is in the run and who waits for whom.

    A member is alive, suspect (silent for a while), vacant (gone; its slot is
    free) or done. SILENT is how long nothing was heard from it. One that is out
    of sync was restarted and has not met all the others since.
    """
    from holdfast.cli import overview, terminal

    with _reached(addresses, run, token_file, timeout_s) as client:
        seen = client.status(timeout_s=timeout_s)
    if json_:
        terminal.say_json(overview.as_json(seen))
    else:
        overview.say(seen)


@coord.command()
@_reaching
@_json
def barriers(
    addresses: tuple[str, ...], run: str, token_file: str | None, timeout_s: float, json_: bool
) -> None:
    """List the barriers, votes and other waits that are open.

    The longest wait comes first. MISSING are those that have not come.
    """
    from holdfast.cli import overview, terminal

    with _reached(addresses, run, token_file, timeout_s) as client:
        seen = client.status(timeout_s=timeout_s)
    if json_:
        terminal.say_json(
            {"run": seen.run, "generation": seen.generation, "waiting": overview.waits_json(seen)}
        )
    elif seen.waiting:
        overview.say_waits(seen)
    else:
        terminal.note("nobody waits")


@coord.command()
@click.argument("key")
@click.option("--prefix", is_flag=True, help="All keys that begin with KEY ('' for every key).")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Wait so long for the key to be there.",
)
@click.option("--raw", is_flag=True, help="Write the value's bytes as they are, without a line end.")
@_reaching
@_json
@click.pass_context
def get(
    context: click.Context, key: str, prefix: bool, wait_s: float | None, raw: bool,
    addresses: tuple[str, ...], run: str, token_file: str | None, timeout_s: float, json_: bool,
) -> None:  # fmt: skip
    """Print the value of KEY.

    A value that is no plain text is shown as Python would write it; --raw gives
    its bytes, --json both text and base64.

    Exit code: 0 there, 1 no such key, 2 error.
    """
    from holdfast.cli import entries, terminal

    if prefix + raw + (wait_s is not None) > 1 or (raw and json_):
        raise click.UsageError("--prefix, --raw, --wait and --json of one value exclude each other", context)
    with _reached(addresses, run, token_file, timeout_s) as client:
        if prefix:
            found = client.scan(key, timeout_s=timeout_s)
        else:
            value = client.get(key, timeout_s) if wait_s is None else client.wait(key, wait_s)
            found = {} if value is None else {key: value}
    if prefix:
        entries.say_all(found, json_=json_)
    elif key not in found:
        terminal.note(f"no key {key!r}")
        context.exit(1)
    elif raw:
        click.echo(found[key], nl=False)
    else:
        entries.say_one(key, found[key], json_=json_)


@coord.command("set")
@click.argument("key")
@click.argument("value")
@click.option("--create", is_flag=True, help="Only if there is no such key.")
@_reaching
@_json
def set_(
    key: str, value: str, create: bool,
    addresses: tuple[str, ...], run: str, token_file: str | None, timeout_s: float, json_: bool,
) -> None:  # fmt: skip
    """Set KEY to VALUE ('-': what comes on standard input).

    Prints the revision: the number of the change. It is on the coordinator's
    disk by then.
    """
    from holdfast.cli import terminal

    data = sys.stdin.buffer.read() if value == "-" else value.encode("utf-8", "surrogateescape")
    with _reached(addresses, run, token_file, timeout_s) as client:
        revision = client.set(key, data, create=create, timeout_s=timeout_s)
    if json_:
        terminal.say_json({"key": key, "bytes": len(data), "revision": revision})
    else:
        terminal.say(f"revision {revision}")
