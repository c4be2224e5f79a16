"""The endpoint's threads: as many as there is work, a few afterwards, none at the end."""

from __future__ import annotations

import threading

from holdfast.clock import Deadline
from holdfast.transfer.workers import KEPT, Workers

NAME = "holdfast-test-workers"


def there() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def test_the_threads_of_a_burst_end_with_it() -> None:
    workers = Workers(NAME)
    gate = threading.Barrier(41)

    def work() -> None:
        gate.wait(20.0)

    for _ in range(40):
        assert workers.submit(work)
    assert len(there()) == 40
    gate.wait(20.0)
    deadline = Deadline(20.0)
    while len(there()) > KEPT:
        assert deadline.remaining(), there()
        there()[0].join(0.01)
    done = threading.Event()
    assert workers.submit(done.set)
    assert done.wait(20.0)
    assert len(there()) == KEPT, "a thread that waits is used again"
    workers.close(20.0)
    assert not there()
    assert not workers.submit(done.set)
