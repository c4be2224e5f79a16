"""`holdfast train`: train a recipe, in this process or as a launched run."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.on_disk import RUNS
from holdfast.cli.settings import SettingsCommand
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.train import RunOptions, TrainConfig


@click.command(cls=SettingsCommand)
@click.argument("recipe")
@click.argument("settings", nargs=-1, metavar="[SETTING=VALUE]...")
@click.option("--name", default="", help="Of the run; one that exists goes on.  [default: the recipe's]")
@click.option("--folder", type=RUNS, default="runs", show_default=True, help="Where the folders of runs lie.")
@click.option("--replicas", type=click.IntRange(min=1), help="Launch so many copies that train together.")
@click.option(
    "--parked", default=0, show_default=True, help="With --replicas: warm processes to replace others."
)
@click.option(
    "--from", "source", default="", metavar="FOLDER", help="Begin a new run from another one's state."
)
@click.option(
    "--init-from",
    "weights",
    default="",
    metavar="FOLDER",
    help="Begin a new run with the weights of a Hugging Face repository.",
)
@click.option("--step", type=int, help="With --from: which step of it.  [default: the newest]")
@click.option(
    "--load", default="params,opt,rng,data", show_default=True, help="With --from: what is taken over."
)
@click.option("--finetune", is_flag=True, help="With --from: take the parameters alone.")
@click.option("--no-strict", is_flag=True, help="With --from: leave new what the checkpoint lacks.")
@click.option("--accept", default="", metavar="SETTING,...", help="Go on with changed settings; or: all.")
@click.option("--plain", is_flag=True, help="Lines instead of a live view, on a terminal too.")
def train(recipe: str, settings: tuple[str, ...], **options: Any) -> None:
    """Train a recipe, with settings changed.

    RECIPE is recipes.tiny (or tiny), module:function, file.py:function or a config.json. The same command
    again goes on where the run was. Without --replicas it runs in this process; with it, workers that crash,
    hang or are taken away are replaced, and the result has the same bits. One that is stopped (Ctrl-C,
    SIGTERM) saves and exits with 75.

    \b
    Examples:
      holdfast train recipes.tiny
      holdfast train recipes.tiny model.hidden=128 rate.peak=1e-3 --name wide
      holdfast train recipes.tiny --replicas 2 --parked 1
      holdfast train recipes.tiny --name tuned --from runs/tiny --finetune
      holdfast train my_recipes.py:qwen --init-from models/Qwen3-0.6B
    """
    from holdfast.recipes import resolve

    config = resolve(recipe, settings)
    config = replace(config, data=config.data.spelled_out())
    needs_jax()
    if options["replicas"] is None:
        if options["parked"]:
            raise UsageError("--parked without --replicas", hint="--replicas 1 launches a run of one")
        _alone(config, options)
    else:
        _launched(config, options)


def needs_jax() -> None:
    """Fails: UsageError, where JAX or optax are not installed."""
    missing = [name for name in ("jax", "optax") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{' and '.join(missing)} not installed here", hint="pip install 'holdfast[train]'")


def _alone(config: TrainConfig, options: dict[str, Any]) -> None:
    from holdfast.cli import readers
    from holdfast.cli.terminal import count
    from holdfast.supervise.decisions import RETRY_CODE
    from holdfast.train import run_training

    chosen = _run_options(options)
    _check_start(Path(options["folder"]) / (options["name"] or config.name), config, chosen)
    with readers.not_needed():
        outcome = run_training(config, chosen)
        steps = count(outcome.steps, "step")
        if outcome.stopped:
            print(f"stopped after {steps}; the same command goes on from there", file=sys.stderr)
            raise click.exceptions.Exit(RETRY_CODE)
        loss = "" if outcome.loss is None else f", loss {outcome.loss:.4f}"
        print(f"{steps}, {count(outcome.samples, 'sample')}{loss}: {outcome.folder}", file=sys.stderr)


def _launched(config: TrainConfig, options: dict[str, Any]) -> None:
    from holdfast.cli.launch import keep_going
    from holdfast.launch import LaunchSettings
    from holdfast.train.state import written_whole

    if not config.batch.lanes and options["replicas"] > 1:
        raise UsageError(
            f"batch.lanes=0 is one world, and --replicas {options['replicas']} asks for several",
            hint="--replicas 1, or batch.lanes=8 to sum the gradients of replicas",
        )
    run, chosen = options["name"] or config.name, _run_options(options)
    files = _start_files(Path(options["folder"]).absolute() / run / "start", config, chosen)
    program = importlib.util.find_spec("holdfast.train.__main__")
    assert program is not None, "it is part of the package"
    settings = LaunchSettings(
        script=(str(program.origin), *map(str, files)),
        run=run,
        folder=options["folder"],
        replicas=options["replicas"],
        parked=options["parked"],
        lanes=config.batch.lanes or 1,
    )
    _check_start(settings.path, config, chosen)
    # Workers read what was resolved here: a recipe or blend that changes meanwhile changes nothing for them.
    for path, text in files.items():
        written_whole(path, text)
    keep_going(settings, plain=options["plain"])


def _start_files(folder: Path, config: TrainConfig, options: RunOptions) -> dict[Path, str]:
    """What workers are told: files named by what they hold.

    Nobody holds the run yet: if it is live, its workers must go on with theirs, which these may not replace.
    """
    import msgspec
    import xxhash

    told = msgspec.json.encode(options).decode()
    return {
        folder / f"config.{config.digest}.json": config.to_json(),
        folder / f"options.{xxhash.xxh3_128_hexdigest(told.encode())}.json": told,
    }


def _check_start(folder: Path, config: TrainConfig, options: RunOptions) -> None:
    """Fails: UsageError, NoCheckpointError, for what each worker would refuse. Changes nothing in the run."""
    from holdfast.cli.terminal import note
    from holdfast.train.state import (
        checkpoint_folder,
        compare_config,
        compare_processes,
        has_steps,
        kept_manifest,
    )

    changed = compare_config(folder, config, options.accept)
    changed |= compare_processes(folder, 1, options.accept)
    if options.accept and not changed and not config.optimizer.transformation:
        # Of a named transformation the workers find out whether it has changed.
        note(f"--accept {','.join(options.accept)} has no effect: no setting differs that changes bits")
    if has_steps(folder, config):
        kept_manifest(folder)
        for option, given in (("--from", options.source), ("--init-from", options.weights)):
            if given:
                note(
                    f"{option} {given} has no effect: the run goes on from the steps that it has saved itself"
                )
        return
    if options.source:
        checkpoint_folder(options.source)
    if options.weights:
        from holdfast.train.model.hub import check_weights

        check_weights(options.weights, config.model)


def _run_options(options: dict[str, Any]) -> RunOptions:
    from holdfast.train import RunOptions

    made = RunOptions(
        name=options["name"],
        folder=options["folder"],
        source=_place(options["source"]),
        weights=_place(options["weights"]),
        step=options["step"],
        load=_words(options["load"]),
        finetune=options["finetune"],
        strict=not options["no_strict"],
        accept=_words(options["accept"]),
        progress=False if options["plain"] else None,
    )
    made.check()
    return made


def _place(text: str) -> str:
    """A path as workers elsewhere find it; the URL of a store as it is."""
    from holdfast.storage import is_url, local_path

    return text if not text or is_url(text) else str(Path(local_path(text)).absolute())


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.replace(",", " ").split() if word)
