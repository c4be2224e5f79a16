"""A process with clients, orders on standard input: `python -m bench.coord.client SUBJECT OPTIONS`."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from bench.coord import ours, peers
from bench.coord.crowds import Crowd, moment

_FACES: dict[str, tuple[type[Any], type[Any]]] = {
    "holdfast": (ours.OneClient, ours.ManyClients),
    "jaxlib": (peers.Jaxlib, peers.Jaxlib),
    "tcpstore": (peers.TcpStore, peers.TcpStore),
    "etcd": (peers.EtcdThread, peers.EtcdLoop),
}
"""For each subject the face for one client in a process, and the one for many."""

_SPIN_S = 0.001


def _made(subject: str, about: dict[str, Any]) -> Crowd:
    slots = range(about["first"], about["first"] + about["size"])
    face = _FACES[subject][len(slots) > 1]
    crowd: Crowd = face(about["address"], slots, about["total"])
    return crowd


def _await(at: float) -> None:
    time.sleep(max(0.0, at - moment() - _SPIN_S))
    while moment() < at:
        pass


def _done(crowd: Crowd, order: dict[str, Any]) -> dict[str, Any]:
    what, times = order["do"], order["times"]
    _await(order["at"])
    started = moment()
    found: Any = None
    ended = 0.0
    if what in ("connect", "exchange", "sets"):
        ended = getattr(crowd, what)(*([times] if times else []))
    elif what in ("barrier", "latency"):
        found = getattr(crowd, what)(times)
    else:
        crowd.close()
    return {"started": started, "ended": ended or moment(), "found": found}


def main() -> None:
    """Obey until the input ends."""
    orders = os.fdopen(os.dup(0), "rb")
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a peer prints must not end up among the answers
    crowd = _made(sys.argv[1], json.loads(sys.argv[2]))
    print("{}", file=out, flush=True)
    for line in orders:
        print(json.dumps(_done(crowd, json.loads(line))), file=out, flush=True)
    os._exit(0)  # jaxlib's destructors abort a process whose service is gone


if __name__ == "__main__":
    main()
