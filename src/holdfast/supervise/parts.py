"""The processes beside the workers: coordinator, vault, host of worlds. Started, adopted, restarted, stopped.

Coordinator and vault outlive the agent; its successor adopts them. Each holds a lease: a file that the agent
keeps locked. Where the lock stays free for `orphan_s`, they finish and go.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

from holdfast.coord import check_addresses
from holdfast.errors import UsageError
from holdfast.supervise.agent_config import AgentConfig
from holdfast.supervise.logs import log_path, opened
from holdfast.supervise.processes import Exit, Process, adopted, end_marked, marked, start, wait_all

COORDINATOR: Final = "coordinator"
VAULT: Final = "vault"
WORLDS: Final = "worlds"
KIND: Final = "HOLDFAST_PART"
_DIGEST: Final = "HOLDFAST_DIGEST"
_SHORT_S: Final = 5.0
"""A part that lived no longer is started again only after a pause."""
_MAX_PAUSE_S: Final = 1.0
_FIRST_PAUSE_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a part is started. `argv` is asked each time; by `same` an old one is as good as a new one."""

    name: str
    argv: Callable[[int], list[str]]
    same: tuple[str, ...]
    bound: bool = False


def recipes(config: AgentConfig) -> list[Recipe]:
    """The parts of a node, in the order in which they are started."""
    found = []
    lease = ["--lease", config.lease, "--orphan-s", f"{config.orphan_s:g}", "--token-fd", "0"]
    if config.hosts_coordinator:
        fixed = ["--folder", os.path.join(config.folder, "coord", "log"), "--discovery", config.discovery]
        fixed += ["--journal", config.journal, "--run", config.run, *lease, *_options(config)]

        def coordinator(failures: int) -> list[str]:
            return [*_python("holdfast.coord"), *fixed, "--bind", _bind(config, failures)]

        found.append(Recipe(COORDINATOR, coordinator, tuple(fixed)))
    if config.vault:
        standing = [
            "--listen",
            config.vault_socket,
            "--run",
            config.run,
            "--serve",
            config.vault_serve,
            *lease,
        ]
        if config.vaults:
            standing += ["--neighbourhood", config.neighbourhood]
        found.append(Recipe(VAULT, lambda _: [*_python("holdfast.vault"), *standing], tuple(standing)))
    if config.workers_per_replica > 1:
        found.append(Recipe(WORLDS, lambda _: _python("holdfast.jax.worlds"), (), bound=True))
    return found


def _python(module: str) -> list[str]:
    return [sys.executable, "-m", module]


def _options(config: AgentConfig) -> list[str]:
    options = []
    for name, value in sorted(config.coordinator.items()):
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            options.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            options += [f"--{flag}", str(value)]
    return options


def _bind(config: AgentConfig, failures: int) -> str:
    """Where the coordinator listens: where it did before, so that clients find it without looking again.

    Its old port may have gone to somebody else meanwhile; after failures it takes any, and says so in the
    discovery file.
    """
    if failures < 2:
        with contextlib.suppress(OSError, UnicodeDecodeError, UsageError), open(config.discovery) as file:
            return check_addresses(file.readline().strip())[0]
    return config.bind


@final
class Part:
    """One part of a node. The agent's loop calls; nothing here blocks but `begin`."""

    def __init__(self, recipe: Recipe, config: AgentConfig) -> None:
        self.name = recipe.name
        self._recipe = recipe
        self._config = config
        self._failures = 0
        self._started_at = 0.0
        self._kill_at: float | None = None
        self._stopped_since: float | None = None
        self.restart_at: float | None = None
        """When it is to be started again; None: it runs, or shall not run."""
        self.process: Process | None = None
        self.reason = ""
        """Why it was lost the last time."""
        self.log = log_path(config.folder, f"{config.node}-{recipe.name}")

    def begin(self) -> bool:
        """Adopt the part that a former agent left, or start one; whether it was adopted.

        Blocks: while a part of other settings, which cannot be adopted, ends. Fails: OSError.
        """
        marks = {**self._config.marks, KIND: self.name}
        if not self._recipe.bound:
            self.process = adopted({**marks, _DIGEST: self._digest()})
        if self.process is None:
            self._end_strangers(marks)
            self.start()
            return False
        self._started_at = time.monotonic()
        return True

    def _end_strangers(self, marks: dict[str, str]) -> None:
        strangers = []
        for pid, _ in marked(marks):
            with contextlib.suppress(OSError):
                strangers.append(Process(pid))
        for process in strangers:
            process.signal(signal.SIGTERM)
            process.signal(signal.SIGCONT)  # one that is stopped cannot end
        wait_all(strangers, self._config.flush_s)
        for process in strangers:
            process.close()
        end_marked(marks)

    def start(self) -> None:
        """Start it now. Fails: OSError."""
        config = self._config
        self.restart_at = None
        log = opened(self.log)
        try:
            self.process = start(
                self._recipe.argv(self._failures),
                env=self._environment(),
                log=log,
                stdin=config.token.encode(),
                bound=self._recipe.bound,
                cwd=config.cwd,
            )
        finally:
            os.close(log)
        self._started_at = time.monotonic()

    def _environment(self) -> dict[str, str]:
        config = self._config
        return {
            **config.env,
            **config.marks,
            KIND: self.name,
            _DIGEST: self._digest(),
            "HOLDFAST_RUN": config.run,
            "HOLDFAST_COORD": f"file:{config.discovery}",
            "HOLDFAST_TOKEN_FD": "0",
        }

    def _digest(self) -> str:
        text = json.dumps([self._recipe.same, hashlib.sha256(self._config.token.encode()).hexdigest()])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def lost(self, exit_: Exit, now: float) -> str:
        """It has ended and is to come back, at once unless it keeps ending; the reason in words."""
        lived_s = now - self._started_at
        pause_s = 0.0
        if lived_s < _SHORT_S:
            pause_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2**self._failures) if self._failures else 0.0
            self._failures += 1
        else:
            self._failures = 0
        self.forget()
        self._stopped_since = None
        self.restart_at = now + pause_s
        self.reason = f"{exit_} after {lived_s:.1f} s"
        return self.reason

    def stop(self, now: float, limit_s: float) -> None:
        """Ask it to finish and go; `tick` ends it after `limit_s`. The same again may only shorten that."""
        self.restart_at = None
        if self.process is not None:
            if self._kill_at is None:
                self.process.signal(signal.SIGTERM)
            self._kill_at = min(self._kill_at or now + limit_s, now + limit_s)

    def tick(self, now: float) -> bool:
        """Kill it if it was asked to go and has not; continue it if it is stopped, and say so by True."""
        if self.process is None:
            return False
        if self._kill_at is not None and now >= self._kill_at:
            self.process.signal(signal.SIGKILL)
        return self._continued(self.process, now)

    def _continued(self, process: Process, now: float) -> bool:
        """The whole run waits for a part that somebody has stopped, and no deadline is short enough for that.

        A worker is killed then, and another computes the same. A part holds what nobody else has.
        """
        facts = process.facts()
        if facts is None or facts.state != "T":
            self._stopped_since = None
            return False
        if self._stopped_since is None:
            self._stopped_since = now
        if now - self._stopped_since < self._config.deadlines.stopped_s:
            return False
        self._stopped_since = None
        process.signal(signal.SIGCONT)
        return True

    def forget(self) -> None:
        """Let go of the process, which has ended or shall live on."""
        if self.process is not None:
            self.process.close()
            self.process = None
