"""Staged state for whoever needs it: a restarted trainer takes it out of the memory of vaults.

A state is offered from the moment its save is staged until the next save begins in its slot. Before that save
may write, readers are cut off and the trainer is told (Begun), so nobody can take a state that is half old
and half new. The parts of a state may lie in several vaults, and copies of them in others: any that make up
the whole will do.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, final

from holdfast import journal
from holdfast.clock import Deadline
from holdfast.errors import HoldfastError, MismatchError, TransferError, VaultError, VersionGoneError
from holdfast.transfer import Endpoint
from holdfast.vault.catalogue import (
    CATALOGUE,
    ENTRIES,
    Held,
    Whole,
    decode_catalogue,
    incomplete_steps,
    offered,
    whole_states,
)
from holdfast.vault.offers import state_name

log = logging.getLogger("holdfast.vault")

_ASK_S: Final = 5.0
"""How long a vault may take to say what it holds, before it is left out."""
_SETTLE_S: Final = 30.0
"""How long to wait for a state that a vault is verifying, before it is taken as it is: the transfer itself
is verified in any case."""


class Restored(NamedTuple):
    """A state from the memory of vaults, and the step it belongs to."""

    step: int
    tree: Any


def restore(
    vaults: Sequence[str],
    into: Any = None,
    *,
    step: int | None = None,
    run: str = "run",
    token: bytes | None = None,
    rank: int = 0,
    world: int = 1,
    timeout_s: float = 60.0,
) -> Restored:
    """The newest step that these vaults hold together (or `step`), on the template's mesh, verified.

    `vaults` are the addresses of all vaults that hold parts of the state; each must answer. Blocks:
    `timeout_s` at most. Fails: VersionGoneError if they hold no whole state, MismatchError, TransferError.
    """
    deadline = Deadline(timeout_s)
    with Endpoint("127.0.0.1:0", run=run, token=token, name="restore") as endpoint:
        asking = _Asking(endpoint, run, deadline)
        held = asking.catalogues(vaults, strict=True)
        states = whole_states(held, run=run)
        if step is not None:
            states = [state for state in states if state.step == step]
        if not states:
            wanted = "a whole state" if step is None else f"step {step}"
            raise VersionGoneError(f"the vaults do not hold {wanted}", hint=_missing(held, run))
        return asking.take(states[0], into, rank, world)


def restore_newest(
    addresses: Sequence[str],
    into: Any = None,
    *,
    token: bytes | None = None,
    run: str = "run",
    min_step: int = 0,
    max_step: int | None = None,
    rank: int = 0,
    world: int = 1,
    timeout_s: float = 60.0,
    events: journal.Journal | None = None,
) -> Restored | None:
    """The newest whole state, from `min_step` to `max_step`, in any of these vaults; None if there is none.

    A vault that does not answer is left out. A state that cannot be had, or does not verify, is passed over
    in favour of an older one; that is logged and written to `events`. Blocks: `timeout_s` at most. Fails:
    MismatchError if the template is of another tree.
    """
    deadline = Deadline(timeout_s)
    with Endpoint("127.0.0.1:0", run=run, token=token, name="restore") as endpoint:
        asking = _Asking(endpoint, run, deadline)
        held = asking.settled(list(dict.fromkeys(addresses)), min_step)
        for gap, ranks in incomplete_steps(held, run=run).items():
            if gap >= min_step:
                log.info("step %d is not whole: no vault holds the part of ranks %s", gap, ranks)
        for state in whole_states(held, run=run, min_step=min_step):
            if max_step is not None and state.step > max_step:
                continue
            try:
                return asking.take(state, into, rank, world)
            except MismatchError:
                raise
            except HoldfastError as error:
                log.warning("step %d cannot be had from the vaults: %s", state.step, error.message)
                if events is not None:
                    reason = f"not to be had from the memory of vaults: {error.message}"
                    events.append(journal.StepSkipped(step=state.step, reason=reason))
            if deadline.expired():
                break
    return None


@final
class _Asking:
    """One restore: what the vaults hold, and the taking of it."""

    def __init__(self, endpoint: Endpoint, run: str, deadline: Deadline) -> None:
        self._endpoint = endpoint
        self._run = run
        self._deadline = deadline

    def catalogues(self, vaults: Sequence[str], *, strict: bool = False) -> list[Held]:
        """What all of these vaults hold. Fails, if `strict`, where one does not answer."""
        if not vaults:
            return []
        # All at once: those of a lost node take their time not to answer.
        with ThreadPoolExecutor(min(32, len(vaults)), thread_name_prefix="holdfast-ask") as pool:
            asked = [(vault, pool.submit(self._catalogue, vault, None)) for vault in vaults]
            found: list[Held] = []
            for vault, answer in asked:
                try:
                    found += answer.result()
                except HoldfastError as error:
                    if strict:
                        raise
                    log.info("the vault at %s is left out: %s", vault, error.message)
        return found

    def _catalogue(self, vault: str, version: int | None) -> tuple[Held, ...]:
        patience = min(_ASK_S, self._deadline.remaining())
        with self._endpoint.prepare(vault, CATALOGUE, timeout_s=patience) as plan:
            return decode_catalogue(str(plan.run(version, patience).result().tree[ENTRIES]))

    def settled(self, vaults: Sequence[str], min_step: int) -> list[Held]:
        """What the vaults hold, once the newest whole state is not being verified any more."""
        patience = Deadline(min(_SETTLE_S, self._deadline.remaining()))
        while True:
            held = self.catalogues(vaults)
            states = whole_states(held, run=self._run, min_step=min_step)
            if not states or states[0].settled or patience.expired():
                return held
            self._await_change(vaults, patience)

    def _await_change(self, vaults: Sequence[str], patience: Deadline) -> None:
        """Return once one of the vaults that verify something has another catalogue."""
        for vault in vaults:
            try:
                with self._endpoint.prepare(vault, CATALOGUE, timeout_s=_ASK_S) as plan:
                    found = plan.run(None, _ASK_S).result()
                    if all(one.settled for one in decode_catalogue(str(found.tree[ENTRIES]))):
                        continue
                    plan.run(found.version + 1, max(0.01, patience.remaining())).result()
                    return
            except HoldfastError:
                continue  # asked again, with all the others

    def take(self, state: Whole, into: Any, rank: int, world: int) -> Restored:
        """The state itself, from whichever holders of its parts work. Fails: HoldfastError of the last."""
        failed: HoldfastError | None = None
        for holders in state.choices():
            try:
                return self._take(state, holders, into, rank, world)
            except (TransferError, VaultError) as error:
                failed = error
                log.info("step %d from %s: %s", state.step, _named(holders), error.message)
                if self._deadline.expired():
                    break
        assert failed is not None
        raise failed

    def _take(self, state: Whole, holders: Iterable[Held], into: Any, rank: int, world: int) -> Restored:
        with self._endpoint.prepare(
            [one.address for one in holders],
            state_name(state.attempt),
            into=into,
            rank=rank,
            world=world,
            timeout_s=min(_ASK_S, max(0.1, self._deadline.remaining())),
        ) as plan:
            version = offered(state.attempt).version
            result = plan.run(version, max(0.1, self._deadline.remaining())).result()
            return Restored(state.step, result.tree)


def _named(holders: Iterable[Held]) -> str:
    return ", ".join(
        f"{one.address} (copy of {one.origin})" if one.origin else one.address for one in holders
    )


def _missing(held: Iterable[Held], run: str) -> str:
    gaps = incomplete_steps(held, run=run)
    if not gaps:
        return "nothing was staged there yet, or it was overwritten"
    shown = "; ".join(f"step {step}: ranks {ranks}" for step, ranks in list(gaps.items())[-3:])
    return f"these parts are held by none of them: {shown}"
