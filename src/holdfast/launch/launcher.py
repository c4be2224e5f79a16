"""A launch: lock, token, agents, conductor, signals. Everything that decides lies in the policy."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final, final

from holdfast.journal import Journal
from holdfast.launch.local import LocalAgents
from holdfast.launch.lock import RunLock, run_token
from holdfast.launch.plan import LaunchSettings, agent_config, node_root, policy_settings
from holdfast.supervise.conductor import Conductor
from holdfast.supervise.decisions import Resize, StopAsked
from holdfast.supervise.parts import COORDINATOR, KIND
from holdfast.supervise.processes import adopted
from holdfast.supervise.status import RunStatus

WISH: Final = "replicas.wish"
"""A file in the run's folder with the number of replicas that the user wants from now on."""
_LOOK_S: Final = 0.5
_SPARE_S: Final = 2.0
"""So much later than the policy would miss it, an agent that is stopped is continued: it only starts."""


@final
class Launch:
    """One launch of a run on this machine.

        launch = Launch(LaunchSettings(script=("train.py",), run="demo", replicas=3))
        code = launch.run()

    `say` gets lines for people; `watcher` gets the status whenever it changed; both may be called from other
    threads.
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
        self._say = say
        self._watcher = watcher
        self._conductor: Conductor | None = None
        self._asked = 0
        self._early: list[StopAsked | Resize] = []
        self.agents: LocalAgents | None = None

    def run(self) -> int:
        """Run to the end; the exit code. A run of that name that was there before goes on where it was.

        Blocks: until the run is over. Fails: LeaseError if somebody launches it now; StorageError.
        """
        settings = self.settings
        with RunLock(settings.path), contextlib.ExitStack() as stack:
            token = run_token(settings.path)
            _forget_coordinator(str(settings.path))
            journal = Journal(settings.journal, component="conductor")
            stack.callback(journal.close)
            agents = LocalAgents(lambda node: agent_config(settings, node, token), say=self._say)
            stack.callback(self._tidy)
            stack.callback(agents.close, str(settings.path), settings.flush_s)
            conductor = Conductor(
                self._policy, agents, journal=journal, folder=settings.path, watcher=self._watcher
            )
            self.agents, self._conductor = agents, conductor
            for wish in self._early:
                conductor.ask(wish)
            stack.enter_context(self._looking(agents))
            code = conductor.run()
            if conductor.message:
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
        if self._conductor is None:
            self._early.append(wish)
        else:
            self._conductor.ask(wish)

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM stop the run meanwhile. For the main thread."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            self.stop(signal.Signals(number).name)

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
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
            shutil.rmtree(node_root(self.settings, node), ignore_errors=True)
        for name in (self.settings.path / "nodes", self.settings.path / WISH):
            with contextlib.suppress(OSError):
                name.rmdir() if name.is_dir() else name.unlink()


def _forget_coordinator(folder: str) -> None:
    """Begin without what the coordinator of an earlier launch knew: its members and its stops are gone.

    One that still lives is adopted with all it knows.
    """
    if adopted({"HOLDFAST_FOLDER": folder, KIND: COORDINATOR}) is None:
        shutil.rmtree(os.path.join(folder, "coord", "log"), ignore_errors=True)


def taken_wish(path: Path) -> int | None:
    """The number in the file, which is removed; None if there is none."""
    try:
        text = path.read_text(encoding="ascii")
        path.unlink()
        return int(text)
    except (OSError, ValueError):
        return None


def leave_wish(folder: Path, replicas: int) -> None:
    """Ask the launch of the run in `folder` for so many replicas. Fails: OSError."""
    new = folder / f"{WISH}.{os.getpid()}"
    new.write_text(f"{replicas}\n", encoding="ascii")
    os.replace(new, folder / WISH)
