"""`AsyncCoordClient`: a session with the coordinator, for coroutines. The same calls as `CoordClient`."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self, cast, final

from holdfast.coord import messages as m
from holdfast.coord.address import check_addresses
from holdfast.coord.calls import ClientCore, WatchState
from holdfast.coord.looped import LoopEngine

_PAGE = 1000


@final
class AsyncWatching:
    """A watch; `close` ends it."""

    def __init__(self, engine: LoopEngine, callback: Callable[[m.Changed], None]) -> None:
        self._engine = engine
        self._callback = callback
        self._state: WatchState | None = None
        self._closed = False

    def _tell(self, changed: m.Changed) -> None:
        if not self._closed:
            self._callback(changed)

    def close(self) -> None:
        """End the watch: the callback is not called again."""
        if not self._closed:
            self._closed = True
            if self._state is not None:
                self._engine.unwatch(self._state)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()


@final
class AsyncCoordClient:
    """One session with the coordinator of a run, on the running loop. Thousands of them fit into one process.

        async with AsyncCoordClient("tcp://127.0.0.1:4711", run="demo", token=token) as coord:
            slot = (await coord.join()).slot
            await coord.barrier("ready")

    `open` (or `async with`) waits until the session stands; without it the first call connects.
    Arguments, guarantees and errors are those of `CoordClient`. `on_push` and the callbacks of watches are
    plain functions, called on the loop.
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
        self._engine = LoopEngine(self._core, check_addresses(addresses), token, on_push)
        self._connect_timeout_s = connect_timeout_s

    async def open(self) -> Self:
        """Wait until the session stands. Fails: UnreachableError, HandshakeError."""
        try:
            await self._engine.wait_ready(self._connect_timeout_s)
        except BaseException:
            await self._engine.close()
            raise
        return self

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

    async def join(
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
        return cast(m.Joined, await self._engine.call(op, timeout_s))

    async def leave(self, reason: str = "", *, timeout_s: float = 10.0) -> None:
        """Go, on purpose. The session is over with it."""
        await self._engine.call(m.Leave(reason), timeout_s)

    async def bury(self, incarnation: str, reason: str, *, timeout_s: float = 10.0) -> None:
        """Declare another process dead that is known to be."""
        await self._engine.call(m.Bury(incarnation, reason), timeout_s)

    async def roster(self, *, timeout_s: float = 10.0) -> m.Members:
        """The members of the generation."""
        return cast(m.Members, await self._engine.call(m.Roster(), timeout_s))

    def progress(self, step: int, phase: str = "") -> None:
        """Note where this process is. Heartbeats carry it; another phase is told at once. Never blocks."""
        self._engine.progress(step, phase)

    # ---- waiting for each other

    async def barrier(
        self, name: str, *, slots: Iterable[int] | None = None, timeout_s: float = 60.0
    ) -> m.Met:
        """Wait for all members, or those in `slots`. Fails: BarrierError for all of them alike."""
        return await self._engine.meet(m.Meet(m.BARRIER, name, timeout_s, _slots(slots)))

    async def cancel(self, name: str, reason: str = "", *, timeout_s: float = 10.0) -> None:
        """Fail the barrier of that name for all who wait at it now."""
        await self._engine.call(m.Cancel(name, reason), timeout_s)

    async def vote(
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
        return await self._engine.meet(m.Meet(m.VOTE, name, timeout_s, _slots(slots), ok, note))

    async def live(
        self, name: str, *, slots: Iterable[int] | None = None, timeout_s: float = 60.0
    ) -> dict[int, str]:
        """The members that are alive, slot to incarnation: the same answer for all that ask together."""
        return dict((await self._engine.meet(m.Meet(m.LIVE, name, timeout_s, _slots(slots)))).live)

    async def finish(self, timeout_s: float = 60.0) -> m.Met:
        """Wait until every member that is alive has finished. From the call on, going is no death."""
        return await self._engine.meet(m.Meet(m.FINISH, "finish", timeout_s))

    # ---- keys and values

    async def set(
        self, key: str, value: bytes, *, owned: bool = False, create: bool = False, timeout_s: float = 10.0
    ) -> int:
        """Set a key; gives the revision. `owned`: it vanishes with this client. `create`: only if absent."""
        return cast(m.Done, await self._engine.call(m.Put(key, value, owned, create), timeout_s)).revision

    async def swap(
        self, key: str, expected: bytes | None, value: bytes, *, owned: bool = False, timeout_s: float = 10.0
    ) -> m.Swapped:
        """Set a key if its value is `expected` (None: absent)."""
        return cast(m.Swapped, await self._engine.call(m.Swap(key, expected, value, owned), timeout_s))

    async def get(self, key: str, timeout_s: float = 10.0) -> bytes | None:
        """The value of a key, or None. Does not wait for it."""
        return cast(m.Value, await self._engine.call(m.Get(key), timeout_s)).value

    async def wait(self, key: str, timeout_s: float) -> bytes:
        """The value of a key. Blocks: until it is there. Fails: DeadlineError."""
        value = cast(m.Value, await self._engine.call(m.Get(key, max(0.001, timeout_s)), timeout_s)).value
        assert value is not None
        return value

    async def scan(self, prefix: str, *, timeout_s: float = 10.0) -> dict[str, bytes]:
        """The keys that begin with `prefix`, in order. Many come in pages, and may change between them."""
        found: dict[str, bytes] = {}
        after, more = "", True
        while more:
            page = cast(m.Items, await self._engine.call(m.Scan(prefix, after, _PAGE), timeout_s))
            found.update((item.key, item.value) for item in page.items if item.value is not None)
            more = page.more
            after = page.items[-1].key if page.items else after
        return found

    async def delete(self, key: str, *, prefix: bool = False, timeout_s: float = 10.0) -> int:
        """Remove a key, or all that begin with it; gives how many there were."""
        return cast(m.Count, await self._engine.call(m.Delete(key, prefix), timeout_s)).count

    async def add(self, key: str, by: int = 1, *, timeout_s: float = 10.0) -> int:
        """Add to a counter; gives its new value."""
        return cast(m.Count, await self._engine.call(m.Add(key, by), timeout_s)).count

    async def watch(
        self, prefix: str, callback: Callable[[m.Changed], None], *, timeout_s: float = 10.0
    ) -> AsyncWatching:
        """Be told of changes to keys that begin with `prefix`: first all there is, then each change once.

        The callback is called on the loop, in turn with `on_push`.
        """
        watching = AsyncWatching(self._engine, callback)
        watching._state = await self._engine.watch(prefix, watching._tell, timeout_s)
        return watching

    # ---- trouble, and the end

    async def report(self, message: str, *, timeout_s: float = 10.0) -> None:
        """Tell every other member of an error, at once."""
        await self._engine.call(m.Report(message), timeout_s)

    async def preempt(self, reason: str, *, timeout_s: float = 10.0) -> m.Stop:
        """Ask the run to stop at a step that all agree on. Asking again, by anybody, is the same stop."""
        op = m.Preempt(reason, self._core.stopping.past)
        return cast(m.Stop, await self._engine.call(op, timeout_s))

    async def reached_stop(self, step: int, timeout_s: float = 10.0) -> bool:
        """Whether `step` is at or after the step at which all stop. Call it before each step.

        Blocks: only while a stop is announced and not decided. Fails: DeadlineError.
        """
        return await self._engine.reached(step, timeout_s)

    async def status(self, *, timeout_s: float = 10.0) -> m.Overview:
        """How things stand."""
        return cast(m.Overview, await self._engine.call(m.Status(), timeout_s))

    async def close(self) -> None:
        """Say goodbye and end the session. A member that neither left nor finished is dead by it."""
        await self._engine.close()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _slots(slots: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if slots is None else tuple(slots)
