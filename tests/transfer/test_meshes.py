"""From any mesh to any mesh, over real processes: every rank gets its slices, bit by bit, and no more."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.arrays import dtype as dtype_of
from tests.checkpoint.children import Children
from tests.transfer.children import Arrays, PeerProcess, array, peers
from tests.transfer.slices import grid

pytestmark = pytest.mark.process

DTYPES = ("float32", "bfloat16", "int8", "bool", "float64", "float8_e4m3fn", "uint16", "complex64")
_numbers = itertools.count(1)


class Case(NamedTuple):
    """Who publishes and who pulls (processes), and how the arrays are cut on either side."""

    sources: list[int]
    targets: list[int]
    published: Arrays
    wanted: Arrays


@st.composite
def meshes(draw: st.DrawFn) -> Case:
    """2 to 4 processes; a process may be on both sides, and an array may be replicated on either."""
    number = draw(st.integers(2, 4))
    sources = draw(st.lists(st.integers(0, number - 1), min_size=1, max_size=3, unique=True))
    targets = draw(st.lists(st.integers(0, number - 1), min_size=1, max_size=3, unique=True))
    published: Arrays = []
    wanted: Arrays = []
    for at in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 40) | st.integers(1, 9), max_size=4))
        kind = draw(st.sampled_from(DTYPES))
        for side, ranks in ((published, len(sources)), (wanted, len(targets))):
            cuts = [draw(st.lists(st.integers(1, max(1, size - 1)), max_size=3)) for size in shape]
            cuts = [[]] * len(shape) if 0 in shape else cuts  # an empty array is one box
            holders = [
                sorted(draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=ranks)))
                for _ in grid(shape, cuts)
            ]
            side.append(array(f"a{at}", shape, dtype=kind, cuts=cuts, holders=holders))
    return Case(sources, targets, published, wanted)


def bytes_of(arrays: Arrays, rank: int) -> int:
    """The bytes of the boxes of a rank."""
    total = 0
    for one in arrays:
        for box, holders in zip(one["boxes"], one["holders"], strict=True):
            if rank in holders:
                total += math.prod(hi - lo for lo, hi in box) * dtype_of(one["dtype"]).itemsize
    return total


def move(processes: list[PeerProcess], case: Case) -> None:
    """Publish, pull twice on every target side by side, and check."""
    name = f"case-{next(_numbers)}"
    addresses = [processes[at].address for at in case.sources]
    ranks = list(enumerate(case.targets))
    for version in (1, 2):
        for rank, at in enumerate(case.sources):
            processes[at].publish(case.published, version, rank=rank, name=name)
        if version == 1:
            for rank, at in ranks:
                more: dict[str, Any] = {"rank": rank, "world": len(ranks), "name": name, "plan": name}
                prepared = processes[at].prepare(addresses, case.wanted, **more)
                assert prepared["nbytes"] == bytes_of(case.wanted, rank)
        for _, at in ranks:
            processes[at].do("run", plan=name, version=version)
        for rank, at in ranks:
            line = processes[at].do("wait")
            assert (line["saw"], line["wrong"], line["version"]) == ("committed", [], version), line
            assert line["nbytes"] == bytes_of(case.wanted, rank)
    for _, at in ranks:
        processes[at].do("close_plan", plan=name)
    for at in case.sources:
        for version in (1, 2):
            processes[at].do("release", name=name, version=version)


@pytest.fixture(scope="module", params=["tcp", "any transport"])
def four(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[PeerProcess]]:
    """Four processes with an endpoint each. Small chunks and a small window, so that both matter."""
    started = Children(tmp_path_factory.mktemp("children"))
    options: dict[str, Any] = {"chunk_bytes": 4096, "window_bytes": 16384, "streams": 2}
    if request.param == "tcp":
        options["transports"] = ["tcp"]
    try:
        yield peers(started, 4, **options)
    finally:
        started.end_all()


QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=15, deadline=None, suppress_health_check=QUIET)
@given(case=meshes())
def test_any_mesh_to_any_mesh(four: list[PeerProcess], case: Case) -> None:
    move(four, case)


@pytest.mark.full
@pytest.mark.timeout(800)
@settings(max_examples=400, deadline=None, suppress_health_check=QUIET)
@given(case=meshes())
def test_many_meshes(four: list[PeerProcess], case: Case) -> None:
    move(four, case)


def test_two_by_two_and_every_rank_pulls_from_both(four: list[PeerProcess]) -> None:
    """Rows on two sources, columns on two targets: each target needs half of each source."""
    shape = (512, 384)
    rows = [array("w", shape, cuts=[(256,), ()], holders=[[0], [1]])]
    columns = [array("w", shape, cuts=[(), (100,)], holders=[[0], [1]])]
    move(four, Case([0, 1], [2, 3], rows, columns))


def test_a_thousand_small_arrays(four: list[PeerProcess]) -> None:
    """They share chunks: small arrays do not become small messages."""
    arrays = [array(f"a{n}", (n % 37, 3), holders=[[0]]) for n in range(1000)]
    move(four, Case([0], [1], arrays, arrays))


def test_a_plan_against_itself(four: list[PeerProcess]) -> None:
    """A process that pulls from itself and from another."""
    shape = (64, 64)
    rows = [array("w", shape, cuts=[(32,), ()], holders=[[0], [1]])]
    move(four, Case([0, 1], [0, 1], rows, [array("w", shape, holders=[[0, 1]])]))
