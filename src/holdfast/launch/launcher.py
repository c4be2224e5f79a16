"""A launch: lock, token, agents, conductor, signals. Everything that decides lies in the policy."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final, TypeVar, final

import msgspec

from holdfast.journal import Journal, StepDone
from holdfast.journal.record import decode
from holdfast.launch.local import LocalAgents
from holdfast.launch.plan import LaunchSettings, agent_config, node_root, policy_settings
from holdfast.supervise.agent_config import forget_vault
from holdfast.supervise.conductor import Conductor
from holdfast.supervise.decisions import Resize, StopAsked
from holdfast.supervise.parts import COORDINATOR, KIND
from holdfast.supervise.processes import adopted
from holdfast.supervise.run_lock import RunLock
from holdfast.supervise.secret import run_token
from holdfast.supervise.status import STATUS_FILE, RunStatus

_log = logging.getLogger("holdfast.launch")

WISH: Final = "replicas.wish"
"""A file in the run's folder with the number of replicas that the user wants from now on."""
Told = TypeVar("Told")
_LOOK_S: Final = 0.5
_RECENT_BYTES: Final = 1 << 20
_SPARE_S: Final = 2.0
"""So much later than the policy would miss it, an agent that is stopped is continued: it only starts."""


@final
class Launch:
    """One launch of a run on this machine.

        launch = Launch(LaunchSettings(script=("train.py",), run="demo", replicas=3))
        code = launch.run()

    `say` gets lines for people; `watcher` gets the status whenever it changed; both may be called from other
    threads. Neither may block: supervision would wait for it. Where they write may be gone: their OSError
    ends nothing.
    """

    def __init__(
        self,
        settings: LaunchSettings,
        *,
        say: Callable[[str], None] = print,
        watcher: Callable[[RunStatus], None] | None = None,
    ) -> None:
        self.settings = settings
        self._policy = policy_settings(settings)
        self._say = _forgiven(say)
        self._watcher = None if watcher is None else _forgiven(watcher)
        self._conductor: Conductor | None = None
        self._asked = 0
        self._asked_for: deque[StopAsked | Resize] = deque()
        self.agents: LocalAgents | None = None

    def run(self) -> int:
        """Run to the end; the exit code. A run of that name that was there before goes on where it was.

        Blocks: until the run is over. Fails: LeaseError if somebody launches it now; StorageError.
        """
        settings = self.settings
        with RunLock(settings.path), contextlib.ExitStack() as stack:
            token, launch = run_token(settings.path), secrets.token_hex(8)
            _forget_coordinator(str(settings.path))
            _compare_lanes(settings)
            _compare_wire(settings)
            journal = Journal(settings.journal, component="conductor")
            stack.callback(journal.close)
            agents = LocalAgents(lambda node: agent_config(settings, node, token, launch), say=self._say)
            stack.callback(self._tidy)
            stack.callback(agents.close, str(settings.path), settings.flush_s)
            conductor = Conductor(
                self._policy, agents, journal=journal, folder=settings.path, watcher=self._watcher
            )
            self.agents, self._conductor = agents, conductor
            self._pass_on()
            stack.enter_context(self._looking(agents))
            code = conductor.run()
            if conductor.message and self._watcher is None:
                self._say(conductor.message)
            return code

    def stop(self, reason: str) -> None:
        """End the run: saved and in order the first time, at once the second. From anywhere; never blocks."""
        self._asked += 1
        self._ask(StopAsked(reason, at_once=self._asked > 1))

    def resize(self, replicas: int) -> None:
        """Go on with so many replicas. From anywhere; never blocks."""
        self._ask(Resize(replicas))

    def _ask(self, wish: StopAsked | Resize) -> None:
        self._asked_for.append(wish)
        self._pass_on()

    def _pass_on(self) -> None:
        """Tell the conductor, once there is one. In this order no wish falls between the two."""
        with contextlib.suppress(IndexError):
            while self._conductor is not None:
                self._conductor.ask(self._asked_for.popleft())

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """SIGINT, SIGTERM and the end of the terminal (SIGHUP, unless it is ignored: nohup) stop the run
        meanwhile. For the main thread.
        """

        def on_signal(number: int, frame: FrameType | None) -> None:
            self.stop(signal.Signals(number).name)

        heard = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            heard.append(signal.SIGHUP)
        before = {number: signal.signal(number, on_signal) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def _looking(self, agents: LocalAgents) -> Iterator[None]:
        """Look for wishes that other processes left in the folder, and for agents that are stopped."""
        over = threading.Event()
        path = self.settings.path / WISH

        def look() -> None:
            while not over.wait(_LOOK_S):
                if (replicas := taken_wish(path)) is not None:
                    self.resize(replicas)
                agents.wake(time.monotonic(), stopped_s=self.settings.agent_dead_s + _SPARE_S)

        thread = threading.Thread(target=look, name="holdfast-wishes", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(5.0)

    def _tidy(self) -> None:
        """Remove what nodes leave that were killed before they could."""
        for node in range(self.settings.nodes):
            forget_vault(node_root(self.settings, node))
            shutil.rmtree(node_root(self.settings, node), ignore_errors=True)
        for name in (self.settings.path / "nodes", self.settings.path / WISH):
            with contextlib.suppress(OSError):
                name.rmdir() if name.is_dir() else name.unlink()


def _forgiven(tell: Callable[[Told], None]) -> Callable[[Told], None]:
    """The same without an OSError: a run does not end because nobody looks at it any more."""

    def told(what: Told) -> None:
        with contextlib.suppress(OSError):
            tell(what)

    return told


def _forget_coordinator(folder: str) -> None:
    """Begin without what the coordinator of an earlier launch knew: its members and its stops are gone.

    One that still lives is adopted with all it knows.
    """
    living = adopted({"HOLDFAST_FOLDER": folder, KIND: COORDINATOR})
    if living is None:
        shutil.rmtree(os.path.join(folder, "coord", "log"), ignore_errors=True)
    else:
        living.close()


def _compare_lanes(settings: LaunchSettings) -> None:
    """Say so if the steps of the run had another number of lanes so far: their sums were others."""
    before = lanes_before(settings.journal)
    if before not in (None, settings.lanes):
        _log.warning(
            "steps had %d lanes so far and have %d from now on: the bits are others than with --lanes %d",
            before,
            settings.lanes,
            before,
        )


def _compare_wire(settings: LaunchSettings) -> None:
    """Say so if the last launch of the run rounded its sums otherwise. Never fails."""
    try:
        before = msgspec.json.decode((settings.path / STATUS_FILE).read_bytes(), type=RunStatus)
    except (OSError, msgspec.MsgspecError):
        return
    if before.step >= 0 and before.wire_dtype != settings.wire_dtype:
        _log.warning(
            "sums were made %s so far and are made %s from now on: the bits are others",
            *(
                "unrounded" if one is None else f"in {one}"
                for one in (before.wire_dtype, settings.wire_dtype)
            ),
        )


def lanes_before(path: Path) -> int | None:
    """How many lanes the last step in a journal had; None if none is near its end. Never fails."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _RECENT_BYTES))
            lines = file.read(_RECENT_BYTES).split(b"\n")
    except OSError:
        return None
    for line in reversed(lines):
        record = decode(line) if b"StepDone" in line else None
        if record is not None and isinstance(record.event, StepDone):
            return record.event.lanes
    return None


def taken_wish(path: Path) -> int | None:
    """The number in the file, which is removed; None if there is none."""
    taken = path.with_name(f"{path.name}.taken")
    try:
        os.replace(path, taken)  # first: a wish that comes while this one is read is the next one
        text = taken.read_text(encoding="ascii")
        taken.unlink()
        return int(text)
    except (OSError, ValueError):
        return None


def leave_wish(folder: Path, replicas: int) -> None:
    """Ask the launch of the run in `folder` for so many replicas. Fails: OSError."""
    new = folder / f"{WISH}.{os.getpid()}"
    new.write_text(f"{replicas}\n", encoding="ascii")
    os.replace(new, folder / WISH)
