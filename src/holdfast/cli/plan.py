"""`holdfast plan`: what a run will be, before anything runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.on_disk import FILE
from holdfast.cli.settings import SettingsCommand
from holdfast.cli.train import needs_jax
from holdfast.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from holdfast.train import TrainConfig
    from holdfast.train.compiler import Finding
    from holdfast.train.devices import Device
    from holdfast.train.planning import Plan


@click.command(cls=SettingsCommand)
@click.argument("recipe")
@click.argument("settings", nargs=-1, metavar="[SETTING=VALUE]...")
@click.option("--device", "kind", default="", metavar="NAME", help="For devices of this kind, as H200.")
@click.option(
    "--compile/--no-compile", "compile_", default=None, help="Ask XLA too.  [default: if JAX is here]"
)
@click.option(
    "--picture", type=FILE, metavar="FILE.svg", help="Draw learning rate and batch size over the run."
)
@click.option("--json", "json_", is_flag=True, help="Print one JSON object instead of tables.")
def plan(recipe: str, settings: tuple[str, ...], kind: str, compile_: bool | None, **options: Any) -> None:
    """Say what a run will be, without running it.

    RECIPE and settings are those of `holdfast train`. Shown are sizes, steps, operations, memory and layout;
    with --compile the programs of a step are compiled, and XLA's own figures stand beside ours.

    \b
    Examples:
      holdfast plan recipes.tiny
      holdfast plan recipes.dense_1b mesh.fsdp=2 --device H100 --no-compile
      holdfast plan recipes.small --picture small.svg
    """
    from holdfast.recipes import resolve
    from holdfast.train import compiler, planning

    config = resolve(recipe, settings)
    ask = importlib.util.find_spec("jax") is not None if compile_ is None else compile_
    if ask:
        needs_jax()
        compiler.prepare(config.mesh.num_devices)
    elif config.optimizer.transformation:
        needs_jax()  # what it keeps, only it can say
    made = planning.plan(config, _device(kind, ask))
    found, why = _findings(config) if ask else ([], "")
    if options["picture"]:
        _draw(Path(options["picture"]), made)
    if options["json_"]:
        _show_json(made, found)
    else:
        from holdfast.cli.planned import show

        show(made, found, why)


def _device(kind: str, ask: bool) -> Device:
    from holdfast.train import devices

    if not kind:
        return devices.here() if ask else devices.Device("not given", known=False)
    found = devices.lookup(kind)
    if found is None:
        raise UsageError(f"there is no device {kind!r}", hint=f"known are {', '.join(devices.known_names())}")
    return found


def _findings(config: TrainConfig) -> tuple[list[Finding], str]:
    """What XLA says; or why it was not asked: whatever that is, the plan is made."""
    from holdfast.train import compiler

    try:
        return compiler.findings(config), ""
    except ConfigError as error:
        return [], "; ".join(error.problems)
    except Exception as error:  # of JAX, for a device or a kernel that is not here
        told = str(error).strip().partition("\n")[0]
        return [], f"{type(error).__name__}: {told}" if told else type(error).__name__


def _draw(path: Path, made: Plan) -> None:
    from holdfast.cli.curves import Panel, picture
    from holdfast.cli.terminal import note

    batches = [(float(row.samples), float(row.size)) for row in made.phases]
    rate = [(float(samples), value) for samples, value in made.rate]
    panels = [
        Panel("Learning rate", rate, lambda value: f"{value:g}"),
        Panel("Samples in a batch", batches, lambda value: f"{value:g}", steps=True),
    ]
    try:
        path.write_text(picture(f"The run {made.name}", panels, "samples consumed"), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", hint="choose another --picture") from error
    note(f"picture: {path}")


def _show_json(made: Plan, found: list[Finding]) -> None:
    import msgspec

    from holdfast.cli.terminal import say_json

    told = msgspec.to_builtins(made)
    told["memory"]["total"] = made.memory.total
    compiler = [
        {**msgspec.to_builtins(one), "flops_error": one.flops_error, "bytes_error": one.bytes_error}
        for one in found
    ]
    say_json({**told, "compiler": compiler})
