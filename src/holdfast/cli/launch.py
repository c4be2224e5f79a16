"""`holdfast launch`: run a training script and keep it going. `holdfast resize`: with more or fewer."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import click

from holdfast.cli.on_disk import RUNS
from holdfast.cli.terminal import count, note
from holdfast.errors import UsageError


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--replicas", default=1, show_default=True, help="Copies of the model that train together.")
@click.option("--workers-per-replica", default=1, show_default=True, help="Processes of each of them.")
@click.option(
    "--parked", default=0, show_default=True, help="Warm processes on each node, to replace others."
)
@click.option("--nodes", default=1, show_default=True, help="Nodes on this machine, each with an agent.")
@click.option("--domains", metavar="A,A,B,..", default="", help="What each node fails together with.")
@click.option("--spares", default=0, show_default=True, help="Nodes of them that are kept free.")
@click.option("--min-replicas", default=1, show_default=True, help="Go on with as few as this.")
@click.option(
    "--max-replicas", default=0, help="Most that `holdfast resize` can ask for.  [default: replicas]"
)
@click.option("--lanes", default=8, show_default=True, help="Microbatches of a step.")
@click.option("--wire-dtype", metavar="DTYPE", help="Round floats to it for the sum of a step: bfloat16.")
@click.option("--run", "name", default="run", show_default=True, help="Name; one that exists is resumed.")
@click.option("--folder", type=RUNS, default="runs", show_default=True, help="Where the folders of runs lie.")
@click.option("--nproc", default=0, help="Threads of each worker, the same everywhere.  [default: all cores]")
@click.option("--log-ranks", default="0", show_default=True, help="Whose output is shown: all, or 0,3.")
@click.option("--grace-s", default=60.0, show_default=True, help="To save and go when the run is stopped.")
@click.option("--step-s", default=10.0, show_default=True, help="No shorter step is a hang.")
@click.option(
    "--deadline", "deadlines", multiple=True, metavar="PHASE=S", help="For another phase than a step."
)
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
    settings = _settings(options)
    for remark in _doubts(options["command"], settings):
        note(f"holdfast: {remark}")
    keep_going(settings, plain=options["plain"])


def keep_going(settings: Any, *, plain: bool) -> None:
    """Launch, and show it, until the run is over; a run that is not done ends this process with its code."""
    from holdfast.cli.live import Remarks, view
    from holdfast.launch import Launch

    code: int | None = None
    remarks = logging.getLogger("holdfast")
    try:
        with view(plain=plain, folder=settings.path) as display:
            handler = Remarks(display)
            remarks.addHandler(handler)
            try:
                running = Launch(settings, say=display.say, watcher=display.show)
                with running.signals():
                    code = running.run()
            finally:
                remarks.removeHandler(handler)
        if display.stuck:
            # Its thread is in the middle of a write; nothing could be flushed at a usual end.
            os._exit(code or 0)
        sys.stdout.flush()
    except OSError:
        if code is None:
            raise  # else the run is over, and only its screen is gone
    if code:
        raise click.exceptions.Exit(code)


def _doubts(command: tuple[str, ...], settings: Any) -> list[str]:
    """What can be meant, and mostly is not."""
    script, *arguments = command
    ours = {name for option in launch.params for name in option.opts if name.startswith("--")}
    after = [one for one in dict.fromkeys(one.partition("=")[0] for one in arguments) if one in ours]
    found = []
    if after:
        found.append(
            f"{', '.join(after)} after {script} is for the script: options of launch come before {script}"
        )
    if settings.replicas > settings.lanes:
        idle = settings.replicas - settings.lanes
        found.append(
            f"a step has {count(settings.lanes, 'lane')} for {settings.replicas} replicas: {idle} of them "
            f"{'has' if idle == 1 else 'have'} nothing to compute; give --lanes {settings.replicas} or more"
        )
    return found


def _slots(options: dict[str, Any]) -> frozenset[int] | None:
    """Whose output is to be shown. Fails: UsageError."""
    from holdfast.supervise.logs import shown

    choice = options["log_ranks"]
    most = max(options["replicas"], options["max_replicas"]) * options["workers_per_replica"]
    try:
        slots = shown(choice)
    except ValueError as error:
        raise UsageError(f"--log-ranks {choice} names no slots", hint="all, or numbers: 0,3") from error
    beyond = sorted(slot for slot in slots or () if not 0 <= slot < most)
    if beyond and most > 0:
        there = f"slots 0 to {most - 1}" if most > 1 else "slot 0 alone"
        raise UsageError(f"--log-ranks {choice}: there is no slot {beyond[0]}", hint=f"this run has {there}")
    return slots


def _phases(given: tuple[str, ...]) -> dict[str, float]:
    """The deadlines of phases by name. Fails: UsageError."""
    found = {}
    for one in given:
        phase, _, seconds = one.partition("=")
        try:
            found[phase.strip()] = float(seconds)
        except ValueError as error:
            raise UsageError(
                f"--deadline {one} is no PHASE=SECONDS", hint="for example compile=3600"
            ) from error
    return found


def _settings(options: dict[str, Any]) -> Any:
    from holdfast.launch import LaunchSettings
    from holdfast.supervise.watch import Deadlines

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
        domains=tuple(name.strip() for name in options["domains"].split(",") if name.strip()),
        spares=options["spares"],
        lanes=options["lanes"],
        wire_dtype=options["wire_dtype"],
        nproc=options["nproc"],
        log_slots=_slots(options),
        grace_s=options["grace_s"],
        deadlines=Deadlines(step_s=options["step_s"], phases=_phases(options["deadlines"])),
    )


@click.command()
@click.argument("run")
@click.argument("replicas", type=int)
@click.option("--folder", type=RUNS, default="runs", show_default=True, help="Where the folders of runs lie.")
def resize(run: str, replicas: int, folder: str) -> None:
    """Have a running launch go on with another number of replicas."""
    from holdfast.cli.status import read_status, run_folder
    from holdfast.launch import leave_wish

    place = run_folder(Path(folder), run)
    status, live = read_status(place)
    if status is None or not live:
        raise UsageError(f"the run {run!r} is not running", hint="`holdfast launch` starts it")
    if replicas < status.min_replicas or 0 < status.max_replicas < replicas:
        raise UsageError(
            f"{replicas} replicas are not between {status.min_replicas} and {status.max_replicas}, the "
            f"limits of this launch of {run}",
            hint="stop it, and start it with other --min-replicas and --max-replicas",
        )
    there = {seat.replica for seat in status.seats if seat.state == "active"}
    leave_wish(place, replicas)
    note(f"{run}: asked for {count(replicas, 'replica')} (now {len(there)})")
