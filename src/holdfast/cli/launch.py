"""`holdfast launch`: run a training script and keep it going. `holdfast resize`: with more or fewer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from holdfast.errors import UsageError


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--replicas", default=1, show_default=True, help="Copies of the model that train together.")
@click.option("--workers-per-replica", default=1, show_default=True, help="Processes of each of them.")
@click.option(
    "--parked", default=0, show_default=True, help="Warm processes on each node, to replace others."
)
@click.option("--nodes", default=1, show_default=True, help="Nodes on this machine, each with an agent.")
@click.option("--spares", default=0, show_default=True, help="Nodes of them that are kept free.")
@click.option("--min-replicas", default=1, show_default=True, help="Go on with as few as this.")
@click.option(
    "--max-replicas", default=0, help="Most that `holdfast resize` can ask for.  [default: replicas]"
)
@click.option("--lanes", default=8, show_default=True, help="Microbatches of a step.")
@click.option("--run", "name", default="run", show_default=True, help="Name; one that exists is resumed.")
@click.option("--folder", default="runs", show_default=True, help="Where the folders of runs lie.")
@click.option("--nproc", default=0, help="Threads of each worker, the same everywhere.  [default: all cores]")
@click.option("--log-ranks", default="0", show_default=True, help="Whose output is shown: all, or 0,3.")
@click.option("--grace-s", default=60.0, show_default=True, help="To save and go when the run is stopped.")
@click.option("--step-s", default=10.0, show_default=True, help="No shorter step is a hang.")
@click.option("--plain", is_flag=True, help="Lines instead of a live view, on a terminal too.")
@click.argument("command", nargs=-1, required=True, metavar="SCRIPT [ARGS]...")
def launch(**options: Any) -> None:
    """Run a training script on this machine and keep it going.

    Workers that crash, hang or are taken away are replaced; the others go on meanwhile. Ctrl-C saves, stops
    and exits; twice, at once. The same command again goes on where it was.

    \b
    Exit codes: 0 done, 75 try again, 78 do not, 79 one step fails again and again,
                80 failures used up what is allowed, 2 a mistake in the command.
    """
    from holdfast.cli.live import view
    from holdfast.launch import Launch
    from holdfast.supervise.status import RunStatus

    settings = _settings(options)
    with view(plain=options["plain"], folder=settings.path) as screen:

        def watcher(status: RunStatus) -> None:
            screen.show(status)

        running = Launch(settings, say=screen.say, watcher=watcher)
        with running.signals():
            code = running.run()
    if code:
        sys.stdout.flush()
        raise click.exceptions.Exit(code)


def _settings(options: dict[str, Any]) -> Any:
    from holdfast.launch import LaunchSettings
    from holdfast.supervise.logs import shown
    from holdfast.supervise.watch import Deadlines

    try:
        slots = shown(options["log_ranks"])
    except ValueError as error:
        raise UsageError(
            f"--log-ranks {options['log_ranks']} names no slots", hint="all, or numbers: 0,3"
        ) from error
    return LaunchSettings(
        script=options["command"],
        run=options["name"],
        folder=options["folder"],
        replicas=options["replicas"],
        workers_per_replica=options["workers_per_replica"],
        min_replicas=options["min_replicas"],
        max_replicas=options["max_replicas"],
        parked=options["parked"],
        nodes=options["nodes"],
        spares=options["spares"],
        lanes=options["lanes"],
        nproc=options["nproc"],
        log_slots=slots,
        grace_s=options["grace_s"],
        deadlines=Deadlines(step_s=options["step_s"]),
    )


@click.command()
@click.argument("run")
@click.argument("replicas", type=click.IntRange(min=1))
@click.option("--folder", default="runs", show_default=True, help="Where the folders of runs lie.")
def resize(run: str, replicas: int, folder: str) -> None:
    """Have a running launch go on with another number of replicas."""
    from holdfast.cli.status import read_status, run_folder
    from holdfast.launch import leave_wish

    place = run_folder(Path(folder), run)
    status, live = read_status(place)
    if status is None or not live:
        raise UsageError(f"the run {run!r} is not running", hint="`holdfast launch` starts it")
    leave_wish(place, replicas)
    click.echo(f"{run}: asked for {replicas} instead of {status.replicas} replicas", err=True)
