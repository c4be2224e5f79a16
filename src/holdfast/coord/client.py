"""`CoordClient`: a process's session with the coordinator, for ordinary threads."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self, cast, final

from holdfast.coord import messages as m
from holdfast.coord.address import check_addresses
from holdfast.coord.calls import ClientCore, WatchState
from holdfast.coord.threaded import Engine

_PAGE = 1000


@final
class Watching:
    """A watch; `close` ends it."""

    def __init__(self, engine: Engine, callback: Callable[[m.Changed], None]) -> None:
        self._engine = engine
        self._callback = callback
        self._state: WatchState | None = None
        self._closed = False

    def _tell(self, changed: m.Changed) -> None:
        if not self._closed:
            self._callback(changed)

    def close(self) -> None:
        """End the watch: the callback is not called again, except for a call that is under way."""
        if not self._closed:
            self._closed = True
            if self._state is not None:
                self._engine.unwatch(self._state)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()


@final
class CoordClient:
    """One session with the coordinator of a run. Safe to share between threads.

        with CoordClient("tcp://127.0.0.1:4711", run="demo", token=token) as coord:
            slot = coord.join().slot
            coord.barrier("ready")

    Making one waits until the session stands. From then on a lost connection is made again by itself and open
    calls go on: each is carried out once. Every call has a deadline; one that no coordinator answers by then
    raises UnreachableError. What the coordinator refuses raises the CoordError of that kind.

    Args:
        addresses: where the coordinator is: "tcp://HOST:PORT", "unix:/path", "file:/path" (a file with one
            address per line), or several of them.
        run: the run that it must serve.
        token: the run's token; None only where the coordinator has none.
        name: what people see in messages and tables.
        connect_timeout_s: how long to wait for the session to stand.
        on_push: called with what the coordinator tells on its own account (Rally, Trouble, Lost, Stop,
            Patience, ...), one at a time, on a thread that holds no lock: it may call the client. The `put`
            of a queue is fine too.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        run: str = "run",
        token: bytes | None = None,
        name: str = "",
        connect_timeout_s: float = 10.0,
        on_push: Callable[[m.Push], None] | None = None,
    ) -> None:
        self._core = ClientCore(run=run, incarnation=uuid.uuid4().hex, name=name)
        self._engine = Engine(self._core, check_addresses(addresses), token, on_push)
        try:
            self._engine.wait_ready(connect_timeout_s)
        except BaseException:
            self._engine.close()
            raise

    # ---- who this is

    @property
    def incarnation(self) -> str:
        """The id of this life of this client."""
        return self._core.incarnation

    @property
    def sid(self) -> int:
        """The number of the session."""
        return self._core.sid

    @property
    def generation(self) -> int:
        """The generation that was joined last; 0 before."""
        return self._core.generation

    @property
    def slot(self) -> int:
        """The slot in that generation; -1 for none."""
        return self._core.slot

    @property
    def is_over(self) -> bool:
        """Whether the coordinator has refused this session for good: no call will succeed any more."""
        return self._core.over is not None

    # ---- membership

    def join(
        self,
        *,
        slot: int | None = None,
        standby: bool = False,
        failed: bool = False,
        timeout_s: float = 300.0,
    ) -> m.Joined:
        """Take part in the next generation, or in this one again.

        `slot` asks for a slot, `standby` to be a spare, `failed` reports that a commit failed, which forces a
        new generation. Blocks: until the generation has formed. Fails: DeadlineError, FencedError.
        """
        op = m.Join(-1 if slot is None else slot, timeout_s, standby, failed)
        return cast(m.Joined, self._engine.call(op, timeout_s))

    def leave(self, reason: str = "", *, timeout_s: float = 10.0) -> None:
        """Go, on purpose. The session is over with it."""
        self._engine.call(m.Leave(reason), timeout_s)

    def bury(self, incarnation: str, reason: str, *, timeout_s: float = 10.0) -> None:
        """Declare another process dead that is known to be."""
        self._engine.call(m.Bury(incarnation, reason), timeout_s)

    def roster(self, *, timeout_s: float = 10.0) -> m.Members:
        """The members of the generation."""
        return cast(m.Members, self._engine.call(m.Roster(), timeout_s))

    def progress(self, step: int, phase: str = "") -> None:
        """Note where this process is. Heartbeats carry it; another phase is told at once. Never blocks."""
        self._engine.progress(step, phase)

    # ---- waiting for each other

    def barrier(self, name: str, *, slots: Iterable[int] | None = None, timeout_s: float = 60.0) -> m.Met:
        """Wait for all members, or those in `slots`. Fails: BarrierError for all of them alike."""
        return self._meet(m.Meet(m.BARRIER, name, timeout_s, _slots(slots)))

    def cancel(self, name: str, reason: str = "", *, timeout_s: float = 10.0) -> None:
        """Fail the barrier of that name for all who wait at it now."""
        self._engine.call(m.Cancel(name, reason), timeout_s)

    def vote(
        self,
        name: str,
        ok: bool,
        *,
        note: bytes = b"",
        slots: Iterable[int] | None = None,
        timeout_s: float = 60.0,
    ) -> m.Met:
        """Whether all are for it: `ok` of the result is true only if every ballot was cast and is true.

        A ballot that was cast stands. After UnreachableError the next call of the same vote gives what became
        of it, whatever ballot it brings.
        """
        return self._meet(m.Meet(m.VOTE, name, timeout_s, _slots(slots), ok, note))

    def live(
        self, name: str, *, slots: Iterable[int] | None = None, timeout_s: float = 60.0
    ) -> dict[int, str]:
        """The members that are alive, slot to incarnation: the same answer for all that ask together."""
        return dict(self._meet(m.Meet(m.LIVE, name, timeout_s, _slots(slots))).live)

    def finish(self, timeout_s: float = 60.0) -> m.Met:
        """Wait until every member that is alive has finished. From the call on, going is no death."""
        return self._meet(m.Meet(m.FINISH, "finish", timeout_s))

    def _meet(self, op: m.Meet) -> m.Met:
        return cast(m.Met, self._engine.call(op, op.timeout_s))

    # ---- keys and values

    def set(
        self, key: str, value: bytes, *, owned: bool = False, create: bool = False, timeout_s: float = 10.0
    ) -> int:
        """Set a key; gives the revision. `owned`: it vanishes with this client. `create`: only if absent."""
        return cast(m.Done, self._engine.call(m.Put(key, value, owned, create), timeout_s)).revision

    def swap(
        self, key: str, expected: bytes | None, value: bytes, *, owned: bool = False, timeout_s: float = 10.0
    ) -> m.Swapped:
        """Set a key if its value is `expected` (None: absent)."""
        return cast(m.Swapped, self._engine.call(m.Swap(key, expected, value, owned), timeout_s))

    def get(self, key: str, timeout_s: float = 10.0) -> bytes | None:
        """The value of a key, or None. Does not wait for it."""
        return cast(m.Value, self._engine.call(m.Get(key), timeout_s)).value

    def wait(self, key: str, timeout_s: float) -> bytes:
        """The value of a key. Blocks: until it is there. Fails: DeadlineError."""
        value = cast(m.Value, self._engine.call(m.Get(key, max(0.001, timeout_s)), timeout_s)).value
        assert value is not None
        return value

    def scan(self, prefix: str, *, timeout_s: float = 10.0) -> dict[str, bytes]:
        """The keys that begin with `prefix`, in order. Many come in pages, and may change between them."""
        found: dict[str, bytes] = {}
        after, more = "", True
        while more:
            page = cast(m.Items, self._engine.call(m.Scan(prefix, after, _PAGE), timeout_s))
            found.update((item.key, item.value) for item in page.items if item.value is not None)
            more = page.more
            after = page.items[-1].key if page.items else after
        return found

    def delete(self, key: str, *, prefix: bool = False, timeout_s: float = 10.0) -> int:
        """Remove a key, or all that begin with it; gives how many there were."""
        return cast(m.Count, self._engine.call(m.Delete(key, prefix), timeout_s)).count

    def add(self, key: str, by: int = 1, *, timeout_s: float = 10.0) -> int:
        """Add to a counter; gives its new value."""
        return cast(m.Count, self._engine.call(m.Add(key, by), timeout_s)).count

    def watch(
        self, prefix: str, callback: Callable[[m.Changed], None], *, timeout_s: float = 10.0
    ) -> Watching:
        """Be told of changes to keys that begin with `prefix`: first all there is, then each change once.

        The callback runs on the same thread as `on_push`.
        """
        watching = Watching(self._engine, callback)
        watching._state = self._engine.watch(prefix, watching._tell, timeout_s)
        return watching

    # ---- trouble, and the end

    def report(self, message: str, *, timeout_s: float = 10.0) -> None:
        """Tell every other member of an error, at once."""
        self._engine.call(m.Report(message), timeout_s)

    def preempt(self, reason: str, *, timeout_s: float = 10.0) -> m.Stop:
        """Ask the run to stop at a step that all agree on. Asking again, by anybody, is the same stop."""
        op = m.Preempt(reason, self._core.stopping.past)
        return cast(m.Stop, self._engine.call(op, timeout_s))

    def reached_stop(self, step: int, timeout_s: float = 10.0) -> bool:
        """Whether `step` is at or after the step at which all stop. Call it before each step.

        Blocks: only while a stop is announced and not decided. Fails: DeadlineError.
        """
        return self._engine.reached(step, timeout_s)

    def status(self, *, timeout_s: float = 10.0) -> m.Overview:
        """How things stand."""
        return cast(m.Overview, self._engine.call(m.Status(), timeout_s))

    def close(self) -> None:
        """Say goodbye and end the session. A member that neither left nor finished is dead by it."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _slots(slots: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if slots is None else tuple(slots)
