"""`holdfast sums`: what summing gradients between replicas will cost, before a run."""

from __future__ import annotations

import math
import re
from typing import Any, Final

import click

from holdfast.errors import UsageError

_SIZE: Final = re.compile(r"([0-9.]+)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWER: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@click.command()
@click.argument("gradients", nargs=-1, required=True, metavar="DTYPE=SIZE...")
@click.option("--lane-s", type=float, required=True, metavar="SECONDS", help="The time that one lane takes.")
@click.option("--replicas", default=2, show_default=True, help="Copies of the model that train together.")
@click.option("--workers-per-replica", default=1, show_default=True, help="Processes of each of them.")
@click.option("--lanes", default=8, show_default=True, help="Microbatches of a step.")
@click.option("--hosts", default=1, show_default=True, help="Machines that hold all workers, evenly.")
@click.option("--link", metavar="SIZE", help="One host's network, each way, in bytes a second.")
@click.option("--device", metavar="SIZE", help="Between device and host, in bytes a second.")
@click.option("--host", metavar="SIZE", help="What a worker adds in a second.  [default: 3GB]")
@click.option("--wire-dtype", metavar="DTYPE", help="Round floats to it, as for launch.")
@click.option("--replace-s", default=60.0, show_default=True, help="A failure's cost in one world.")
@click.option("--json", "json_", is_flag=True, help="Print one JSON object instead of a table.")
def sums(gradients: tuple[str, ...], json_: bool, **options: Any) -> None:
    """Say what sums between replicas will cost.

    Exposed time of a step, bytes per host, the time after losing a replica, and
    when one world is better.

    \b
      holdfast sums float32=3.8GB --replicas 8 --hosts 8 --lane-s 0.5 \\
          --link 12.5GB
    """
    from holdfast.cli import terminal
    from holdfast.launch.plan import check_wire_dtype
    from holdfast.reduce import SumSettings, sum_plan

    check_wire_dtype(options["wire_dtype"])
    plan = sum_plan(SumSettings(gradient_bytes=_by_dtype(gradients), **_rates(options)))
    if json_:
        terminal.say_json(plan.as_dict())
    else:
        for line in plan.lines():
            terminal.say(line)


def _by_dtype(gradients: tuple[str, ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in gradients:
        name, equals, size = one.partition("=")
        if not equals:
            raise UsageError(f"{one!r} is not DTYPE=SIZE", hint="float32=3.8GB, for example")
        found[name] = found.get(name, 0) + int(size_in_bytes(size))
    return found


def _rates(options: dict[str, Any]) -> dict[str, Any]:
    """The options as settings; those that were not given are left to their defaults."""
    rates = {f"{name}_bytes_s": options.pop(name) for name in ("link", "device", "host")}
    return {**options, **{name: size_in_bytes(text) for name, text in rates.items() if text is not None}}


def size_in_bytes(text: str) -> float:
    """The bytes that `512MiB`, `3.8GB` or a plain number mean. Fails: UsageError."""
    found = _SIZE.fullmatch(text.strip())
    try:
        if found is not None:
            number, unit, binary = found.groups()
            return float(number) * math.pow(1024 if binary else 1000, _POWER[unit.lower()])
    except ValueError:
        pass
    raise UsageError(f"{text!r} is no size", hint="1500000, 3.8GB and 512MiB are")
