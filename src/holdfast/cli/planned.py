"""A plan as a person reads it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from holdfast.cli.curves import chart
from holdfast.cli.terminal import Column, count, say, say_table, size
from holdfast.train.quantities import short_count

if TYPE_CHECKING:
    from holdfast.train.compiler import Finding
    from holdfast.train.planning import Plan


def show(plan: Plan, findings: list[Finding], why: str) -> None:
    """All of it, on stdout. `why`: the reason that the compiler was not asked."""
    say(f"{plan.name}   config {plan.digest[:12]}")
    _parameters(plan)
    _steps(plan)
    _rate(plan)
    _layout(plan)
    _memory(plan)
    _compiler(findings, why)


def _title(text: str) -> None:
    say()
    say(text)


def _parameters(plan: Plan) -> None:
    _title(f"parameters  {plan.num_params:,}")
    say("  " + ", ".join(f"{purpose} {short_count(number)}" for purpose, number in plan.params.items()))


def _steps(plan: Plan) -> None:
    tokens = short_count(plan.total_tokens)
    _title(f"steps  {plan.total_steps:,}: {plan.total_samples:,} samples, {tokens} tokens")
    columns = (
        "from step",
        "from sample",
        "from token",
        "batch",
        "steps",
        "tokens a step",
        "made of",
        "FLOPs a step",
    )
    rows = [
        (
            f"{row.step:,}",
            f"{row.samples:,}",
            short_count(row.tokens),
            f"{row.size:,}",
            f"{row.num_steps:,}",
            f"{row.tokens_per_step:,}",
            _pieces(plan, row.microbatches, row.size),
            short_count(row.flops_per_step),
        )
        for row in plan.phases
    ]
    say_table([Column(title, right=True) for title in columns], rows, indent=2)
    _title(f"model FLOPs  {short_count(plan.flops_per_token)} a token, {plan.total_flops:.3g} in all")
    say(f"  {plan.convention}")


def _pieces(plan: Plan, microbatches: int, batch: int) -> str:
    at_once = plan.micro or batch
    inner = f"{microbatches} x {at_once}"
    return f"{plan.lanes} lanes x {inner}" if plan.lanes else inner


def _rate(plan: Plan) -> None:
    values = [value for _, value in plan.rate]
    _title(f"learning rate  {values[0]:g} at first, {max(values):g} at most, {values[-1]:g} at last")
    if "utf" in (sys.stdout.encoding or "").lower():
        for line in chart([(float(samples), value) for samples, value in plan.rate]):
            say(f"  {line}")


def _layout(plan: Plan) -> None:
    num_devices = plan.mesh["data"] * plan.mesh["fsdp"] * plan.mesh["tensor"]
    axes = " x ".join(f"{axis} {plan.mesh[axis]}" for axis in ("data", "fsdp", "tensor"))
    _title(f"layout  {axes} = {count(num_devices, 'device')} a replica, ZeRO {plan.mesh['zero']}")
    rows = [
        (row.name, str(row.count), " x ".join(str(size) for size in row.shape), row.rests, row.computed)
        for row in plan.layout
    ]
    columns = [
        Column("array"),
        Column("count", right=True),
        Column("shape"),
        Column("rests"),
        Column("computed with"),
    ]
    say_table(columns, rows, indent=2)


def _memory(plan: Plan) -> None:
    used = plan.memory
    _title(f"memory  {size(used.total)} a device")
    say_table([Column("what"), Column("bytes", right=True), Column("for")], _memory_rows(plan), indent=2)
    if plan.device_memory:
        share = used.total / plan.device_memory
        verdict = "fits" if share <= 1 else "does NOT fit"
        say(f"  {verdict} on {plan.device}: {share:.0%} of {size(plan.device_memory)}")
        small = plan.smallest
        if small is None:
            say("  smallest replica: none that this batch allows has room; try model.remat=full")
        else:
            how = " ".join(small.settings) or "as it is"
            say(
                f"  smallest replica: {count(small.num_devices, 'device')} ({how}), "
                f"{size(small.memory.total)} each"
            )
    else:
        say(f"  the device is {plan.device}: --device H200 says whether it fits")
    say(f"  a checkpoint: {size(plan.state_bytes)}; each replica holds it all")
    if plan.sums_bytes:
        say(f"  replicas add up {size(plan.sums_bytes)} of gradients a step")


def _memory_rows(plan: Plan) -> list[tuple[str, str, str]]:
    used = plan.memory
    return [
        ("parameters", size(used.params), "at rest"),
        ("optimizer", size(used.optimizer), "moments, and float32 copies where parameters are not"),
        ("gradients", size(used.sums), "sums over a microbatch or a lane"),
        ("cast weights", size(used.casts), "in the compute dtype"),
        ("activations", size(used.kept), "kept for the backward pass"),
        ("workspace", size(used.workspace), "logits and what one layer needs at a time"),
    ]


def _compiler(findings: list[Finding], why: str) -> None:
    if why:
        _title(f"compiler  not asked: {why}")
    if not findings:
        return
    _title("compiler  XLA's own figures for a device, ours beside them")
    rows = [
        (
            one.program,
            f"{one.samples:,}",
            "not counted" if one.xla_flops is None else short_count(one.xla_flops),
            short_count(one.flops),
            "" if one.flops_error is None else f"{one.flops_error:+.1%}",
            size(one.xla_bytes),
            size(one.bytes),
            f"{one.bytes_error:+.1%}",
        )
        for one in findings
    ]
    titles = ("samples", "XLA FLOPs", "ours", "error", "XLA bytes", "ours", "error")
    say_table([Column("program"), *(Column(title, right=True) for title in titles)], rows, indent=2)
