"""Coordination: barriers, registration and keys beside jaxlib, torch's TCPStore and etcd."""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from bench import machine
from bench.report import Bar, Report, Series

BARS = {
    "barrier_4_vs_jaxlib": Bar("barrier of 4 processes, jaxlib's time / ours", "at least", 2),
    "barrier_256_vs_jaxlib": Bar("barrier of 256 clients, jaxlib's time / ours", "at least", 3),
    "register_256_vs_jaxlib": Bar("registration of 256 clients, jaxlib's time / ours", "at least", 2),
    "kv_vs_jaxlib": Bar("sets and gets per second of 256 clients / jaxlib", "at least", 2.5),
    "kv_vs_tcpstore": Bar("sets and gets per second of 256 clients / TCPStore", "at least", 1),
    "durable_set_vs_etcd": Bar("durable sets per second of 256 clients / etcd", "at least", 2),
    "restart_s": Bar("SIGKILL of the coordinator until all clients are answered", "at most", 1),
}

_DESCRIPTORS = 65_536
"""4,096 clients in a process need more than the usual 1,024."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    parser.add_argument("--dir", type=Path, help="folder on the disk to sync to (default: build/)")
    parser.add_argument("--skip-peers", action="store_true", help="measure Holdfast only")


def run(args: argparse.Namespace) -> Report:
    """Measure everything."""
    from bench.coord.rounds import SMOKE, Plan, Rounds

    rounds = 1 if args.smoke else args.rounds
    plan = SMOKE if args.smoke else Plan()
    installed = _peers()
    peers = [] if args.skip_peers else [name for name, there in installed.items() if there]
    _allow_descriptors()
    with machine.work_folder(args.dir or Path("build"), "coord") as folder:
        about = machine.description(folder)
        measured = Rounds(folder, ["holdfast", *peers], plan, progress)
        measured.run(rounds)
        raw = measured.raw()
    notes = [f"not installed, so not measured: {name}" for name, there in installed.items() if not there]
    notes += [f"failed: {failure}" for failure in measured.failures]
    if args.smoke:
        notes.append("a smoke run: few clients and cold code, the numbers mean nothing")
    return Report(
        bars=BARS,
        values=_values(raw, plan.few, plan.many),
        method=_method(plan.few, plan.many, rounds, about),
        versions=_versions(),
        raw=raw,
        notes=notes,
    )


def _peers() -> dict[str, bool]:
    from bench.coord.service import etcd_binary

    return {
        "jaxlib": find_spec("jaxlib") is not None,
        "tcpstore": find_spec("torch") is not None,
        "etcd": etcd_binary() is not None and find_spec("grpc") is not None,
    }


def _versions() -> dict[str, str]:
    from bench.coord.service import etcd_version

    found = machine.versions("holdfast", "msgspec", "uvloop", "jaxlib", "torch", "grpcio")
    etcd = etcd_version()
    return found if etcd is None else {**found, "etcd": etcd}


def _allow_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _values(raw: Mapping[str, Series], few: int, many: int) -> dict[str, float | None]:
    def ratio(over: str, under: str) -> float | None:
        return raw[over].median / raw[under].median if over in raw and under in raw else None

    def slower(peer: str, what: str) -> float | None:
        """Of times: the peer's over ours."""
        return ratio(f"{peer} {what}", f"holdfast {what}")

    def busier(peer: str, what: str) -> float | None:
        """Of rates: ours over the peer's."""
        return ratio(f"holdfast {what}", f"{peer} {what}")

    clients = f"{many:,} clients"
    return {
        "barrier_4_vs_jaxlib": slower("jaxlib", f"barrier, {few} clients"),
        "barrier_256_vs_jaxlib": slower("jaxlib", f"barrier, {clients}"),
        "register_256_vs_jaxlib": slower("jaxlib", f"registration, {clients}"),
        "kv_vs_jaxlib": busier("jaxlib", f"set and get, {clients}"),
        "kv_vs_tcpstore": busier("tcpstore", f"set and get, {clients}"),
        "durable_set_vs_etcd": busier("etcd", f"set, {clients}"),
        "restart_s": raw[f"holdfast restart, {few + many} clients"].median,
    }


def _method(few: int, many: int, rounds: int, about: str) -> str:
    return (
        f"Medians of {rounds} rounds; every round starts every server afresh, in a process of its own, and "
        "measures every subject at every size, one after the other, in an order of its own. All over TCP "
        f"on the loopback. {few} clients: a process each, blocking calls. More: all in one process, jaxlib "
        "and TCPStore on a thread each, Holdfast and etcd as tasks of one event loop (uvloop where "
        "installed). Holdfast at its defaults: with a token, every answer after its record is written, "
        "those about keys and generations after fdatasync; heartbeats on. jaxlib: what "
        "jax.distributed.initialize passes. TCPStore: libuv; its set is not acknowledged, its get is. etcd: "
        "one member, gRPC, one channel, answers not decoded; it syncs every put. Barriers: the same one "
        "again and again, the median period of the first client in each round. Registration: from the first "
        "connect until every client knows that all are in, servers running and modules imported. Set and "
        "get: each client sets and gets 64 bytes under a key of its own, in turns; calls per second of all. "
        f"Restart: SIGKILL of the coordinator under {few + many} members in {few + 1} processes, started "
        f"again at once; from the signal until each of them has set a key. Machine: {about}."
    )


def progress(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)
