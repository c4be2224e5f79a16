"""`holdfast ckpt prune`: remove the steps that no rule keeps."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint import Lease, Policy, StepInfo, doomed, in_flight, readable_steps, remove_step
from holdfast.checkpoint.retention import Best
from holdfast.cli import terminal
from holdfast.cli.policy_text import Rule, joined
from holdfast.cli.terminal import Column, Styled
from holdfast.errors import LeaseError, StorageError, UsageError
from holdfast.journal import Journal, StepPruned
from holdfast.storage import Store, is_url
from holdfast.vault import WORK

_LOCK = re.compile(r"writer-(0|[1-9][0-9]{0,8})\.lock")


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one step, and why. `info` is None where the manifest cannot be read."""

    step: int
    info: StepInfo | None
    remove: bool
    reasons: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return self.info.nbytes if self.info is not None else 0


def decisions(store: Store, rules: list[Rule], *, now: float) -> list[Decision]:
    """What the rules decide about every committed step, oldest first."""
    infos, broken = readable_steps(store)
    for rule in rules:
        _check_metric(rule.policy, infos)
    kept_by = [(rule.text, rule.policy.kept(infos, now=now)) for rule in rules]
    gone = set(doomed(infos, joined(rules), now=now))
    found = [Decision(step, None, False, ("its manifest cannot be read",)) for step in broken]
    for info in infos:
        reasons = [text for text, kept in kept_by if info.step in kept]
        if info.pinned:
            reasons.append("pinned")
        if info is infos[-1]:
            reasons.append("newest")
        remove = info.step in gone
        found.append(Decision(info.step, info, remove, tuple(reasons) or ("no rule keeps it",)))
    return sorted(found, key=lambda decision: decision.step)


def _check_metric(policy: Policy, infos: Sequence[StepInfo]) -> None:
    """Fails: UsageError for a metric that no step has: such a rule keeps nothing."""
    if (
        not isinstance(policy, Best)
        or not infos
        or any(one.metric(policy.metric) is not None for one in infos)
    ):
        return
    names = sorted({name for info in infos for name in _metrics(info)})
    near = difflib.get_close_matches(policy.metric, names, 1)
    raise UsageError(
        f"no step here has a metric {policy.metric!r}",
        hint=f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names) or 'none'}",
    )


def _metrics(info: StepInfo) -> list[str]:
    nested = info.meta.get("metrics")
    names = [*info.meta, *(nested if isinstance(nested, Mapping) else ())]
    return [name for name in names if info.metric(name) is not None]


@contextmanager
def quiet_folder(store: Store) -> Iterator[None]:
    """Hold every writer's lease, so that no run writes here meanwhile.

    Fails: LeaseError if a live run, or a vault that finishes its last save, does.
    """
    ranks = {0} | {int(m[1]) for name in store.names(WORK) if (m := _LOCK.fullmatch(name))}
    with ExitStack() as leases:
        for rank in sorted(ranks):
            leases.callback(_lease(store, rank).close)
        if steps := in_flight(store):
            raise LeaseError(
                f"{store.root}: step {steps[-1]} is being written",
                hint="wait until it is committed, or use --dry-run to look without removing",
            )
        yield


def _lease(store: Store, rank: int) -> Lease:
    try:
        return Lease(store, rank)
    except LeaseError as error:
        raise LeaseError(
            error.message,
            hint="a live run removes old steps itself, by its own policy; end it first, "
            "or use --dry-run to look without removing",
        ) from None


def remove(store: Store, steps: Sequence[int]) -> None:
    """Remove steps, oldest first. Fails: StorageError that says which are gone already."""
    path = os.path.join(store.root, "journal.jsonl")
    there = not is_url(store.root) and os.path.exists(path)
    journal = Journal(path, component="cli") if there else None
    gone: list[int] = []
    try:
        for step in steps:
            remove_step(store, step)
            gone.append(step)
            if journal is not None:
                journal.append(StepPruned(step=step))
            terminal.note(f"removed step {step}")
    except StorageError as error:
        before = f"steps removed before that: {', '.join(map(str, gone))}" if gone else "no step was removed"
        raise StorageError(
            f"{error.message}; {before}", path=error.path, errno_=error.errno, hint=error.hint
        ) from error
    finally:
        if journal is not None:
            journal.close(timeout_s=5.0)


def say(found: Sequence[Decision], *, now: float, dry_run: bool) -> None:
    """The decisions for people."""
    columns = (
        Column("STEP", right=True),
        Column("CREATED (UTC)"),
        Column("AGE", right=True),
        Column("SIZE", right=True),
        Column("DECISION"),
        Column("WHY", fold=True),
    )
    rows = []
    for one in found:
        info = one.info
        rows.append(
            (
                str(one.step),
                terminal.moment(info.created)[:16] if info else "-",
                terminal.age(now - info.created) if info else "-",
                terminal.size(one.nbytes) if info else "-",
                Styled("remove", "red") if one.remove else "keep",
                ", ".join(one.reasons),
            )
        )
    terminal.say_table(columns, rows)
    going = [one for one in found if one.remove]
    verb = "would remove" if dry_run else "removing"
    freed = terminal.size(sum(one.nbytes for one in going))
    terminal.say(f"{verb} {len(going)} of {terminal.count(len(found), 'step')} ({freed})")


def as_json(store: Store, found: Sequence[Decision], rules: list[Rule], dry_run: bool) -> dict[str, Any]:
    """The decisions as one object."""
    return {
        "path": store.root,
        "policy": " | ".join(rule.text for rule in rules),
        "dry_run": dry_run,
        "removed": [one.step for one in found if one.remove],
        "kept": [one.step for one in found if not one.remove],
        "steps": [
            {
                "step": one.step,
                "action": "remove" if one.remove else "keep",
                "reasons": list(one.reasons),
                "bytes": one.nbytes,
                "created": terminal.iso(one.info.created) if one.info else None,
            }
            for one in found
        ],
    }
