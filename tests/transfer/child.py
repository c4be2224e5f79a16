"""One process with one endpoint, told what to do in JSON lines and reporting in JSON lines.

    python -m tests.transfer.child

Each line is `{"do": NAME, ...}` and is answered by `{"saw": ..., "at": MONOTONIC, ...}`.
Errors are answers too: `{"saw": "error", "kind": CLASS, "text": ...}`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import resource
import signal
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any, final

import numpy as np

from holdfast import faults
from holdfast.arrays import adapter_of, adapters, flatten_tree
from holdfast.transfer import Endpoint, Publication, Transfer, TransferPlan
from tests.transfer.slices import Slices, values

_saying = threading.Lock()
_order = 0


def say(saw: str, **fields: object) -> None:
    """One line to whoever started us; from the main thread it is the answer to the order carried out."""
    order = _order if threading.current_thread() is threading.main_thread() else 0
    line = json.dumps({"saw": saw, "order": order, "at": time.monotonic(), **fields})
    with _saying:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def tree_of(arrays: list[dict[str, Any]]) -> dict[str, Slices]:
    """The template that a description in JSON means."""
    return {one["name"]: Slices(one["dtype"], one["shape"], one["boxes"], one["holders"]) for one in arrays}


def whole(name: str, leaf: Slices, version: int) -> np.ndarray[Any, Any]:
    return values(name, leaf.dtype, leaf.shape, version)


@final
class Watch:
    """Stands in for armed faults: does something at the nth hit of a site, then nothing more."""

    def __init__(self, site: str, nth: int, act: Any) -> None:
        self._site, self._left, self._act = site, nth, act
        self._lock = threading.Lock()

    def hit(self, name: str) -> None:
        if name != self._site:
            return
        with self._lock:
            self._left -= 1
            due = self._left == 0
        if due:
            self._act()


@final
class Peer:
    """What the process has; each `do_NAME` is one command."""

    def __init__(self) -> None:
        self.endpoint: Endpoint | None = None
        self.published: dict[tuple[str, int], Publication] = {}
        self.plans: dict[str, TransferPlan] = {}
        self.runs: dict[str, Transfer] = {}
        self.ended: dict[str, Future[float]] = {}
        self.kept: list[Any] = []
        self.into: dict[str, Any] = {}

    def do_open(self, token: str | None = None, **options: Any) -> None:
        if "transports" in options:
            options["transports"] = tuple(options["transports"])
        self.endpoint = Endpoint(token=None if token is None else token.encode(), **options)
        say("open", address=self.endpoint.address, pid=os.getpid())

    def do_publish(
        self, name: str, arrays: list[dict[str, Any]], rank: int, version: int, lease_s: float = 600.0
    ) -> None:
        assert self.endpoint is not None
        tree: dict[str, Any] = {
            key: leaf.filled(whole(key, leaf, version), rank) for key, leaf in tree_of(arrays).items()
        }
        tree["step"] = version
        self.published[name, version] = self.endpoint.publish(name, tree, version, lease_s=lease_s)
        say("published", version=version)

    def do_release(self, name: str, version: int) -> None:
        self.published.pop((name, version)).release()
        say("released")

    def do_lapse(self, name: str, version: int) -> None:
        """End its lease."""
        assert self.endpoint is not None
        self.endpoint.shelf._lapse(self.published[name, version]._edition)
        say("lapsed")

    def do_targets(self, name: str, version: int) -> None:
        say("targets", outcomes=list(self.published[name, version].targets().values()))

    def do_prepare(
        self, plan: str, peers: list[str], name: str, arrays: list[dict[str, Any]], rank: int, **options: Any
    ) -> None:
        assert self.endpoint is not None
        into: dict[str, Any] = dict(tree_of(arrays))
        into.setdefault("step", 0)
        self.plans[plan] = self.endpoint.prepare(peers, name, into=into, rank=rank, **options)
        say("prepared", nbytes=self.plans[plan].nbytes, digest=self.plans[plan].digest)

    def do_run(self, plan: str, run: str = "run", cancel_at: list[Any] | None = None, **options: Any) -> None:
        """Start a run. `cancel_at` [site, nth] cancels it there."""
        ready = threading.Event()
        if cancel_at is not None:
            site, nth = cancel_at

            def cancel() -> None:
                assert ready.wait(20)
                self.runs[run].cancel()

            faults._armed = Watch(site, nth, cancel)  # type: ignore[assignment]
        transfer = self.plans[plan].run(**options)
        self.runs[run] = transfer
        ready.set()
        ended = self.ended[run] = Future()
        # Not as a callback gets to know: that holds what came of the run for a moment longer.
        transfer._when_done(lambda: ended.set_result(time.monotonic()))
        say("running")

    def do_cancel(self, run: str = "run") -> None:
        self.runs[run].cancel()
        say("cancelled")

    def do_wait(self, run: str = "run", timeout_s: float = 30.0, keep: bool = False) -> None:
        """The end of a run."""
        transfer, ended = self.runs[run], self.ended[run]
        try:
            result = transfer.result(timeout_s)
        except Exception as error:
            said = {"ended": ended.result(20), "outcome": transfer.outcome}
            say("error", kind=type(error).__name__, text=str(error), **said)
            return
        finally:
            self.runs.pop(run)
        if keep:
            self.kept.append(result.tree)
        say(
            "committed",
            ended=ended.result(20),
            outcome=transfer.outcome,
            version=result.version,
            nbytes=result.nbytes,
            transports=sorted(set(result.transports.values())),
            wrong=self.wrong(result.tree, result.version),
        )

    def wrong(self, tree: dict[str, Any], version: int) -> list[str]:
        """The leaves that are not those of this version, bit by bit."""
        found = [] if tree["step"] == version else ["step"]
        for name, leaf in tree.items():
            if isinstance(leaf, Slices) and leaf.differs(whole(name, leaf, version)):
                found.append(name)
        return found

    def do_current(self, plan: str) -> None:
        """The version in service, and what is wrong with it."""
        current = self.plans[plan].current
        if current is None:
            say("current", version=None, wrong=[])
            return
        version, tree = current
        say("current", version=version, wrong=self.wrong(tree, version))

    def do_check_kept(self) -> None:
        """What is wrong with the trees of earlier runs that somebody still holds."""
        wrong = [name for tree in self.kept for name in self.wrong(tree, tree["step"])]
        self.kept.clear()
        say("kept", wrong=wrong)

    def do_close_plan(self, plan: str) -> None:
        self.plans.pop(plan).close()
        say("closed")

    def do_close(self) -> None:
        assert self.endpoint is not None
        for plan in self.plans.values():
            plan.close()
        self.plans.clear()
        self.published.clear()
        self.endpoint.close()
        self.endpoint = None
        say("closed")

    def do_arm(self, faults_text: str) -> None:
        faults.arm(faults_text)
        say("armed")

    def do_announce(self, site: str, nth: int = 1) -> None:
        """Say so at the nth hit of a site."""
        faults._armed = Watch(site, nth, lambda: say("site", site=site))  # type: ignore[assignment]
        say("armed")

    def do_limit(self, more_bytes: int | None) -> None:
        """Allow this process so much more memory than it has; None lifts the limit."""
        size = resource.RLIM_INFINITY
        if more_bytes is not None:
            with open("/proc/self/statm") as file:
                size = int(file.read().split()[0]) * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
        say("limited")

    def do_usage(self) -> None:
        """What the process holds now; threads that wait for work are kept for the next, and hold nothing."""
        gc.collect()
        kept = self.endpoint.workers._idle if self.endpoint is not None else 0
        fds = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                fds.append(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError:
                continue  # the one that listed them
        with open("/proc/self/status") as file:
            ctypes.CDLL(None).malloc_trim(0)  # what is freed but kept for later is no leak
            status = dict(line.split(":", 1) for line in file)
        with open("/proc/self/maps") as file:
            mapped = sum("memfd:" in line for line in file)
        say(
            "usage",
            fds=sorted(fds),
            memfds=sum("memfd:" in name for name in fds),
            mapped=mapped,
            threads=threading.active_count() - kept,
            resident=int(status["VmRSS"].split()[0]) << 10,
        )

    def do_end(self) -> None:
        say("ending")
        sys.exit(0)


def main() -> None:
    faulthandler.register(signal.SIGUSR1)  # all stacks, for whoever looks into a hang
    assert adapter_of(Slices("int8", (1,), [((0, 1),)], [(0,)]), adapters()) is not None
    flatten_tree({})
    global _order
    peer = Peer()
    say("up", pid=os.getpid())
    for line in sys.stdin:
        order = json.loads(line)
        _order = order.pop("order")
        try:
            getattr(peer, "do_" + order.pop("do"))(**order)
        except Exception as error:
            say("error", kind=type(error).__name__, text=str(error))


if __name__ == "__main__":
    main()
