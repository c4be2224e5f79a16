"""Publishing and pulling by hand: what is behind `holdfast transfer serve` and `pull`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from holdfast.arrays import flatten
from holdfast.cli import terminal, treefile
from holdfast.clock import Deadline
from holdfast.errors import DeadlineError
from holdfast.transfer import Endpoint

if TYPE_CHECKING:
    from holdfast.transfer import Transfer, TransferResult

_LOOK_EVERY_S: Final = 0.2
_SILENT_LOOKS: Final = 15
_LEASE_S: Final = 1e8
"""Served until it is stopped: three years."""


class Loaded(NamedTuple):
    """A tree from a disk, with the name and version that it is published under unless told otherwise."""

    tree: Any
    name: str
    version: int


@dataclass(frozen=True, slots=True)
class Offer:
    """What is published."""

    tree: Any
    name: str
    version: int


def loaded(path: str) -> Loaded:
    """The tree that PATH means. Fails: StorageError, FormatError, NoCheckpointError."""
    if treefile.is_treefile(path) and os.path.isfile(path):
        with terminal.progress(f"reading {path}", os.path.getsize(path)) as advance:
            return Loaded(treefile.read(path, advance), Path(path).stem, 0)
    return _checkpoint(path)


def _checkpoint(path: str) -> Loaded:
    from holdfast.checkpoint import step_manifest
    from holdfast.checkpoint.loading import LoadOptions, StepLoad
    from holdfast.cli import folder

    place = folder.placed(path)
    step = folder.newest_or(place)
    load = StepLoad(step_manifest(place.store, step), None, LoadOptions(), rank=0, world=1)
    terminal.note(f"reading step {step} of {place.store.root} ({terminal.size(load.nbytes)})")
    tree, _ = load.run([place.store], lambda _error, _root: None)
    return Loaded(tree, _name(path, place.store.root), step)


def _name(path: str, root: str) -> str:
    """The last part of the folder that PATH or PATH@STEP names: of a run it is the run's, not `ckpt`."""
    parent, _, last = root.rpartition("/")
    of_run = any(one and os.path.abspath(one) == parent for one in (path, path.rpartition("@")[0]))
    return os.path.basename(parent) if of_run else last


# ---- serving


def serve(offer: Offer, *, bind: str, run: str, token_file: str | None, json_: bool) -> None:
    """Publish until SIGTERM or SIGINT; says where, and who took it."""
    over = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        over.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with (
            Endpoint(bind, run=run, token=_token(token_file)) as endpoint,
            endpoint.publish(offer.name, offer.tree, offer.version, lease_s=_LEASE_S) as publication,
        ):
            _say_ready(offer, endpoint.address, publication.nbytes, json_=json_)
            seen: dict[str, str] = {}
            while not over.wait(_LOOK_EVERY_S):
                now = publication.targets()
                for target in now.keys() - {name for name, was in seen.items() if was == now.get(name)}:
                    state = "under way" if now[target] == "unknown" else now[target]
                    terminal.note(f"{target}: {state}")
                seen = now
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say_ready(offer: Offer, address: str, nbytes: int, *, json_: bool) -> None:
    num_arrays = _num_arrays(offer.tree)
    if json_:
        about = {"address": address, "name": offer.name, "version": offer.version, "bytes": nbytes}
        terminal.say_json({**about, "arrays": num_arrays, "pid": os.getpid()}, indent=None)
    else:
        what = f"{terminal.count(num_arrays, 'array')}, {terminal.size(nbytes)}"
        terminal.say(f"serving {offer.name} version {offer.version} ({what}) at {address}")
    sys.stdout.flush()


def _num_arrays(tree: Any) -> int:
    return sum(hasattr(leaf, "shape") for _, leaf in flatten(tree)[0])


def _token(token_file: str | None) -> bytes | None:
    if token_file is None:
        return None
    from holdfast.cli.coordinator import read_token

    return read_token(Path(token_file))


# ---- pulling


def pull(
    addresses: Sequence[str],
    name: str,
    *,
    version: int | None,
    file: str | None,
    timeout_s: float,
    run: str,
    token_file: str | None,
    json_: bool,
) -> None:
    """Fetch a tree, write it where one was asked for, and say how it went."""
    if file is not None:
        treefile.check_new(file)
    with Endpoint(
        "127.0.0.1:0", run=run, token=_token(token_file), name="holdfast transfer pull"
    ) as endpoint:
        deadline = Deadline(timeout_s)
        # A version that is asked for may come yet; a name alone is there, or is misspelt.
        wait_s = timeout_s if version is not None else 0.0
        with terminal.unless_soon(_awaiting(addresses, name, version, timeout_s)):
            plan = endpoint.prepare(list(addresses), name, timeout_s=timeout_s, wait_s=wait_s)
        try:
            left_s = deadline.remaining()
            waiting = "" if version is None else _awaiting(addresses, name, version, left_s)
            with terminal.progress(f"pulling {name}", plan.nbytes) as advance:
                result = awaited(plan.run(version, deadline_s=left_s), advance, waiting)
        finally:
            plan.close()
        if file is not None:
            terminal.note(f"writing {file}")
            treefile.write(file, result.tree)
        _say_pulled(name, result, file, json_=json_)


def _awaiting(addresses: Sequence[str], name: str, version: int | None, timeout_s: float) -> str:
    what = name if version is None else f"version {version} of {name}"
    return f"waiting for {what} at {', '.join(addresses)}, {timeout_s:.0f} s at most"


def awaited(future: Transfer, advance: terminal.Progress, waiting: str = "") -> TransferResult:
    """The result of a transfer, with progress meanwhile; given up, it is cancelled.

    `waiting` is said once if nothing of it has come for a while.
    """
    looks = 0
    try:
        while True:
            try:
                return future.result(_LOOK_EVERY_S)
            except DeadlineError:
                if future.done():  # then it is the transfer's own
                    raise
            looks += 1
            done = future.progress()[0]
            if waiting and not done and looks == _SILENT_LOOKS:
                terminal.note(waiting)
            advance(done)
    except BaseException:
        future.cancel()
        raise


def _say_pulled(name: str, result: TransferResult, file: str | None, *, json_: bool) -> None:
    num_arrays = _num_arrays(result.tree)
    if json_:
        terminal.say_json(
            {
                "name": name,
                "version": result.version,
                "bytes": result.nbytes,
                "arrays": num_arrays,
                "seconds": result.seconds,
                "transports": result.transports,
                "verified": result.checked,
                "file": file,
            }
        )
        return
    rate = result.nbytes / result.seconds / 1e9 if result.seconds else 0.0
    what = f"{terminal.count(num_arrays, 'array')}, {terminal.size(result.nbytes)}"
    how = ", ".join(f"{peer} by {transport}" for peer, transport in result.transports.items())
    terminal.say(
        f"{name} version {result.version}: {what} in {result.seconds:.2f} s ({rate:.2f} GB/s), verified"
    )
    terminal.say(f"  from {how}")
    if file is not None:
        terminal.say(f"  in {file}")
