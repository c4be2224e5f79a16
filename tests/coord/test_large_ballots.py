"""A ballot of rank 0 carries the run's metadata, which may be large."""

from __future__ import annotations

from pathlib import Path

from holdfast.coord import SharedFolderAgreement
from holdfast.storage import LocalStore


def test_a_ballot_of_several_mebibytes_reaches_the_other_rank(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    first, second = (SharedFolderAgreement(store, rank=rank, world=2) for rank in range(2))
    large = bytes(range(256)) * (3 << 12)
    first.vote("1.a", large)
    second.vote("1.a", b"small")
    assert dict(second.ballots("1.a", 10.0)) == {0: large, 1: b"small"}
