"""Sources that break the rules: the run fails in time, what was in service stays, and the next run works."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.clock import Deadline
from holdfast.errors import HoldfastError, IntegrityError, PeerLostError, StalledError, TransferError
from holdfast.transfer import Endpoint, TransferPlan
from holdfast.transfer.manifest import ArrayInfo, Manifest
from holdfast.transfer.messages import (
    Failed,
    Refused,
    Run,
    Sent,
    Started,
    Wrote,
)
from tests.transfer.raw import FakeSource, Play

pytestmark = pytest.mark.process


PROMPT_S = 5.0
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
WHOLE = np.arange(10_000, dtype=np.float32)
MANIFEST = Manifest((ArrayInfo("w", "float32", (10_000,), (((0, 10_000),),)),), ())
CHUNK = 16_384


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeSource]:
    with FakeSource(MANIFEST, WHOLE.tobytes()) as found:
        yield found


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    with Endpoint(chunk_bytes=CHUNK, streams=1, idle_s=0.4, first_byte_s=0.4, transports=("tcp",)) as found:
        yield found


def runs_well(plan: TransferPlan) -> dict[str, np.ndarray[Any, Any]]:
    """The tree of the next run, which works; on a busy machine perhaps only once idle_s was enough for it."""
    deadline = Deadline(PROMPT_S)
    while True:
        try:
            tree: dict[str, np.ndarray[Any, Any]] = plan.run(version=1).result(PROMPT_S).tree
        except StalledError:
            if deadline.expired():
                raise
        else:
            assert np.array_equal(tree["w"], WHOLE)
            return tree


@pytest.fixture
def plan(endpoint: Endpoint, fake: FakeSource) -> Iterator[TransferPlan]:
    """A plan that has run well, and runs well afterwards."""
    fake.play = FakeSource.well
    found = endpoint.prepare([fake.address], "policy", into={"w": WHOLE})
    tree = runs_well(found)
    yield found
    assert np.array_equal(tree["w"], WHOLE)
    fake.play = FakeSource.well
    runs_well(found)
    found.close()


def refused(plan: TransferPlan, fake: FakeSource, play: Play, *kinds: type[Exception]) -> None:
    """Check that a run of this play fails in time, and leaves what was in service."""
    fake.play = play
    transfer = plan.run(version=1)  # which may take longer
    with pytest.raises(kinds or TransferError):
        transfer.result(PROMPT_S)
    assert transfer.outcome == "aborted"
    assert plan.current is not None
    assert np.array_equal(plan.current[1]["w"], WHOLE)


def wrong_bytes(fake: FakeSource, run: Run) -> None:
    fake.send_chunk(run.run, 0)
    fake.send_chunk(run.run, 1, digest=bytes(range(16)))


def not_all(fake: FakeSource, run: Run) -> None:
    fake.send_chunk(run.run, 0)
    fake.say(Sent(run.run))


def twice(fake: FakeSource, run: Run) -> None:
    for number in (0, 1, 1):
        fake.send_chunk(run.run, number)
    fake.say(Sent(run.run))


def in_shared_memory(fake: FakeSource, run: Run) -> None:
    for number in range(fake.num_chunks):
        fake.say(Wrote(run.run, number, 1, bytes(16)))


def lost_data(fake: FakeSource, run: Run) -> None:
    fake.send_chunk(run.run, 0)
    for sock in fake.data[:1]:
        sock.close()


@pytest.mark.parametrize(
    ("play", "kinds"),
    [
        (wrong_bytes, (IntegrityError,)),
        (not_all, (TransferError,)),
        (twice, (TransferError,)),
        (in_shared_memory, (TransferError,)),
        (lost_data, (PeerLostError,)),
        (lambda fake, run: None, (StalledError,)),
        (lambda fake, run: fake.send_chunk(run.run, 0, nbytes=2**32 - 1), (TransferError,)),
        (lambda fake, run: fake.send_chunk(run.run, 0, chunk=2**32 - 1), (TransferError,)),
        (lambda fake, run: fake.send_chunk(run.run, 0, chunk=3), (TransferError,)),
        (lambda fake, run: fake.send_chunk(run.run, 0, fake.chunk(0)[:-4]), (TransferError,)),
        (lambda fake, run: fake.send_chunk(run.run, 3, fake.chunk(0)), (TransferError,)),
        (lambda fake, run: fake.send_chunk(run.run + 1000, 0), (TransferError,)),
        (lambda fake, run: fake.raw(b"HTTP/1.1 400 Bad Request\r\n" + bytes(100)), (TransferError,)),
        (lambda fake, run: fake.raw(bytes(200)), (TransferError,)),
        (lambda fake, run: fake.say(Failed(run.run, "misuse", "it broke")), (TransferError,)),
        (lambda fake, run: fake.say(Refused(run.seq, "nonsense", "go away")), (TransferError,)),
        (lambda fake, run: fake.say(Started(run.seq, run.run, 7, ())), (TransferError,)),
    ],
    ids=[
        "digest", "not all", "twice", "shared memory", "data connection closed", "silence", "4 GB chunk",
        "chunk number", "other chunk's number", "short", "long", "other run", "http", "zeros", "failed",
        "refused", "started twice",
    ],
)  # fmt: skip
def test_a_source_that_breaks_the_rules(
    plan: TransferPlan, fake: FakeSource, play: Play, kinds: tuple[type[Exception], ...]
) -> None:
    refused(plan, fake, play, *kinds)


@settings(max_examples=40, deadline=None, suppress_health_check=QUIET)
@given(
    chunk=st.integers(0, 5) | st.integers(0, 2**32 - 1),
    run_off=st.sampled_from([0, 0, 1, 2**40]),
    nbytes=st.integers(0, 20_000) | st.integers(0, 2**32 - 1),
    filler=st.binary(max_size=64),
)
def test_any_head_of_a_chunk(
    endpoint: Endpoint, fake: FakeSource, chunk: int, run_off: int, nbytes: int, filler: bytes
) -> None:
    """Right bits or an error; never anything else, and the next run works."""
    fake.play = FakeSource.well
    plan = endpoint.prepare([fake.address], "policy", into={"w": WHOLE})

    def play(fake: FakeSource, run: Run) -> None:
        with suppress(OSError):
            fake.send_chunk(run.run + run_off, 0, filler * 16, chunk=chunk, nbytes=nbytes)
            fake.well(run)

    fake.play = play
    with suppress(TransferError):
        assert np.array_equal(plan.run(version=1).result(PROMPT_S).tree["w"], WHOLE)
    fake.play = FakeSource.well
    runs_well(plan)
    plan.close()


HUGE = 1 << 40


@pytest.mark.parametrize(
    "manifest",
    [
        Manifest((ArrayInfo("w", "float32", (HUGE,), (((0, HUGE),),)),), ()),
        Manifest((ArrayInfo("w", "float32", (HUGE, HUGE), (((0, HUGE), (0, HUGE)),)),), ()),
        Manifest((ArrayInfo("w", "float32", (10,), (((0, 2**62),),)),), ()),
        Manifest((ArrayInfo("w", "float32", (-10,), (((0, -10),),)),), ()),
        Manifest((ArrayInfo("w", "float32", (10,), (((5, 2), (0, 5)),)),), ()),
        Manifest((ArrayInfo("w", "nonsense", (10,), (((0, 10),),)),), ()),
        Manifest((ArrayInfo("w", "float32", (10,), ()),), ()),
        Manifest(tuple(itertools.repeat(ArrayInfo("w", "float32", (10,), (((0, 10),),)), 2)), ()),
    ],
    ids=["4 TiB", "overflow", "box", "negative", "boxes", "dtype", "nothing", "name twice"],
)
def test_a_manifest_that_claims_too_much_or_makes_no_sense(endpoint: Endpoint, manifest: Manifest) -> None:
    """Refused before memory is taken, even if the target asked for everything there is."""
    with FakeSource(manifest, b"") as liar, pytest.raises(HoldfastError):
        endpoint.prepare([liar.address], "policy", timeout_s=PROMPT_S).run(deadline_s=1.0).result(PROMPT_S)
