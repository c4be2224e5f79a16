"""`holdfast.join()`: how a training program becomes a worker of a run, or a run of one."""

from __future__ import annotations

import hmac
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from holdfast.coord import CoordClient
from holdfast.errors import DeadlineError, UsageError
from holdfast.journal import Journal
from holdfast.reduce import Reducer
from holdfast.supervise import hooks
from holdfast.supervise.decisions import RETRY_CODE
from holdfast.supervise.donors import Donor
from holdfast.supervise.inheritance import Inheritance, inheritance
from holdfast.supervise.members import Members, Place
from holdfast.supervise.messages import Order, Seat, Take, Waiting
from holdfast.supervise.run import Parts, Run, RunInfo
from holdfast.supervise.saving import Keep, MirrorAt, RunSaver
from holdfast.supervise.secret import run_token
from holdfast.supervise.solo import NoBoard, Solo
from holdfast.supervise.stream import Stream
from holdfast.wire import ConnectionLost

JOURNAL: Final = "journal.jsonl"
_LANES: Final = 8
_CONNECT_S: Final = 60.0
_PARKED_S: Final = 86400.0
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def join(
    *,
    rehearse: Callable[[], Any] | None = None,
    name: str | None = None,
    samples_per_step: int | None = None,
    world: str = "auto",
    lanes: int | None = None,
    keep: Keep = 3,
    checkpoints: str | os.PathLike[str] | None = None,
    mirror: MirrorAt = None,
    folder: str | os.PathLike[str] = "runs",
) -> Run:
    """This process's part in a run: under `holdfast launch` as one of its workers, alone as a run of one.

        with holdfast.join() as run:
            state = run.restore(init)
            for step in run.steps(until=10_000):
                for lane in step.lanes:
                    step.add(lane, lane_grads(state, batch(step.index, lane)))
                state = apply(state, step.total())
                step.done(state)

    Args:
        rehearse: called first, to compile what a step needs; a parked process does that before it is needed.
        name: of a run of one, whose folder is then runs/<name>; under launch it is given.
        samples_per_step: so that progress is counted in samples (`step.samples`).
        world: "auto" starts a JAX world for the workers of a replica if the program uses JAX and there are
            several of them; "jax" and "none" say so.
        lanes: how many lanes a step has, in a run of one; under launch it is given.
        keep: which checkpoints stay, as for `Checkpointer`.
        checkpoints: the folder they go to; `ckpt` in the run's folder if not given.
        mirror: a second place that they are copied to, such as "s3://bucket/run", as for `Checkpointer`.
        folder: where the folder of a run of one lies; under launch it is given.

    Blocks: under launch, until this process is given a seat; a parked process may wait for days.
    Fails: UsageError; UnreachableError where there is no coordinator.
    """
    if world not in ("auto", "jax", "none"):
        raise UsageError(f"world={world!r} is unknown", hint="use 'auto', 'jax' or 'none'")
    given = inheritance()
    if given is None:
        if rehearse is not None:
            rehearse()
        num_lanes = _LANES if lanes is None else lanes
        return _alone(name or "run", samples_per_step, num_lanes, keep, checkpoints, mirror, Path(folder))
    board, orders = given.board, given.orders
    hooks.watch_compiles(lambda: board.compiling(True), lambda: board.compiling(False))
    if rehearse is not None:
        before = board.phase("compile")
        rehearse()
        board.phase(before)
    orders.send(Waiting())
    board.phase("parked")
    take = _seat(orders)
    board.phase("init")
    place = Place(take.seat, take.replicas, take.workers_per_replica, take.lanes, take.wire_dtype)
    return _member(given, place, samples_per_step, world, lanes, keep, checkpoints, mirror)


def _seat(orders: Stream[Order]) -> Take:
    """The seat that this process is given."""
    while True:
        try:
            order = orders.receive(_PARKED_S)
        except DeadlineError:
            continue  # parked for as long as the agent lives
        except ConnectionLost:
            raise SystemExit(RETRY_CODE) from None  # the agent is gone, and this process with it
        if isinstance(order, Take):
            return order
        raise SystemExit(0)  # told to go, and nobody knows of this process yet


def _alone(
    name: str,
    samples_per_step: int | None,
    lanes: int,
    keep: Keep,
    checkpoints: str | os.PathLike[str] | None,
    mirror: MirrorAt,
    base: Path,
) -> Run:
    folder = own_folder(base, name)
    if lanes < 1:
        raise UsageError(f"lanes={lanes}", hint="at least one")
    place = Place(Seat(0, 0, 0), 1, 1, lanes)
    key = _key(run_token(folder).encode())
    events = Journal(folder / JOURNAL, component="worker 0")
    parts = Parts(
        board=NoBoard(),
        events=events,
        solo=Solo(Reducer(run=name, num_lanes=lanes), lanes),
        saver=RunSaver(checkpoints or folder / "ckpt", run=name, events=events, keep=keep, mirror=mirror),
    )
    info = RunInfo(
        name=name,
        folder=folder,
        place=place,
        samples_per_step=samples_per_step,
        key=key,
    )
    return Run(info, parts)


def own_folder(base: Path, name: str) -> Path:
    """Where everything of a run of one lies. Fails: UsageError for what is no name of a run."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name of a run", hint="letters, digits and . _ - are fine")
    return base.absolute() / name


def _key(token: bytes | None) -> bytes:
    """What user code gets instead of the token, which opens every door of the run."""
    return hmac.digest(token, b"what workers keep for each other", "sha256") if token else b""


def _member(
    given: Inheritance,
    place: Place,
    samples_per_step: int | None,
    world: str,
    lanes: int | None,
    keep: Keep,
    checkpoints: str | os.PathLike[str] | None,
    mirror: MirrorAt,
) -> Run:
    folder = Path(given.folder)
    label = f"slot {place.slot}"
    events = Journal(folder / JOURNAL, component=f"worker {place.slot}")
    if lanes not in (None, place.lanes):
        raise UsageError(
            f"lanes={lanes}, but this run has {place.lanes}", hint=f"holdfast launch --lanes {lanes} ..."
        )
    donor = Donor(run=given.run, token=given.token, name=label)
    reducer = Reducer(
        run=given.run,
        token=given.token,
        num_lanes=place.lanes,
        wire_dtype=place.wire_dtype,
        name=label,
    )
    members = Members(
        place,
        reducer,
        connect=_Connecting(given, label),
        transfer=donor.address,
        board=given.board,
        events=events,
    )
    info = RunInfo(
        name=given.run,
        folder=folder,
        node=given.node,
        place=place,
        samples_per_step=samples_per_step,
        key=_key(given.token),
        launch=given.launch,
    )
    leave = None
    if place.workers > 1 and (world == "jax" or (world == "auto" and "jax" in sys.modules)):
        about = hooks.RunInfo(given.run, folder, given.node)
        leave = hooks.start_world(members.client, place.seat, place.workers, about)
    parts = Parts(
        board=given.board,
        events=events,
        saver=RunSaver(
            checkpoints or folder / "ckpt",
            run=given.run,
            rank=place.seat.index,
            world=place.workers,
            writer=given.vault or "vault",
            vaults=given.vaults,
            coordinator=given.coordinator,
            token=given.token,
            events=events,
            keep=keep,
            mirror=mirror,
        ),
        members=members,
        donor=donor,
        orders=given.orders,
        leave_world=leave,
    )
    return Run(info, parts)


def keeping() -> tuple[Path, bytes] | None:
    """The folder of the run that this process was started for, and its key (`Run.key`), before `join`.

    None where there is no seat to be had without `join` touching it first: alone, or where several workers
    make up a replica, of which none may touch a device before it has a seat.
    """
    given = inheritance()
    if given is None or int(os.environ.get("HOLDFAST_WORKERS", "1")) > 1:
        return None
    return Path(given.folder), _key(given.token)


class _Connecting:
    """Makes the session with the coordinator, once somebody listens to what it tells."""

    def __init__(self, given: Inheritance, name: str) -> None:
        self._given = given
        self._name = name

    def __call__(self, heard: Callable[[Any], None]) -> CoordClient:
        return CoordClient(
            self._given.coordinator,
            run=self._given.run,
            token=self._given.token,
            name=f"{self._name} pid {os.getpid()}",
            connect_timeout_s=_CONNECT_S,
            on_push=heard,
        )
