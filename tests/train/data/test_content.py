"""The digest of a token file's content: what it notices, and how little it reads."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.errors import DataError
from holdfast.train.data import DataConfig
from holdfast.train.data.config import Source
from holdfast.train.data.content import BLOCK, NUM_BLOCKS, WHOLE, content_digest, spans
from holdfast.train.data.ingestion import Recipe, build
from holdfast.train.data.manifest import make_manifest
from tests.train.data.sets import counting, write_set


def digest(path: Path) -> str:
    fd = os.open(path, os.O_RDONLY)
    try:
        return content_digest(fd)
    finally:
        os.close(fd)


def test_every_byte_of_a_small_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "small.bin"
    data = bytearray(range(256)) * 9000  # beyond one read
    path.write_bytes(data)
    before = digest(path)
    for at in (0, 1 << 20, len(data) - 1):
        data[at] ^= 1
        path.write_bytes(data)
        assert digest(path) != before, at
        data[at] ^= 1
    path.write_bytes(data)
    assert digest(path) == before
    path.write_bytes(bytes(len(data)))
    zeros = digest(path)
    path.write_bytes(bytes(len(data) + 1))
    assert digest(path) != zeros


@pytest.mark.parametrize("size", [WHOLE + 1, WHOLE + 12345, 10**9, 10**13])
def test_of_a_large_file_both_ends_and_samples_of_the_rest_are_read(size: int) -> None:
    found = spans(size)
    assert found[0] == (0, BLOCK)
    assert found[-1] == (size - BLOCK, size)
    assert sum(stop - start for start, stop in found) == (NUM_BLOCKS + 2) * BLOCK
    assert all(before[1] <= after[0] for before, after in pairwise(found))
    # No stretch of two strides is left out: text that differs for that long is noticed.
    assert max(after[0] - before[1] for before, after in pairwise(found)) < 2 * size // NUM_BLOCKS
    gaps = {after[0] - before[0] for before, after in pairwise(found[1:-1])}
    assert len(gaps) > NUM_BLOCKS // 2


def test_a_large_file_of_other_content_is_another(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    size = WHOLE + (8 << 20)
    with path.open("wb") as file:
        file.truncate(size)
    before = digest(path)
    start, stop = spans(size)[7]
    with path.open("r+b") as file:
        file.seek(stop)  # between two samples: what `data show --verify` is for
        file.write(b"\1")
        file.flush()
        assert digest(path) == before
        file.seek(start)
        file.write(b"\1")
        file.flush()
        assert digest(path) != before


def test_a_node_with_other_tokens_of_the_same_lengths_is_refused(tmp_path: Path) -> None:
    path = write_set(tmp_path / "a", counting(20, 30))
    config = DataConfig(sources=(Source(path=path),), vocab_size=1000, split="1")
    stream = config.build(seq_len=8)
    there = config.build(seq_len=8, manifest=stream.manifest)
    write_set(tmp_path / "a", counting(20, 30, first=1))
    with pytest.raises(DataError, match=r"a\.bin, byte 0: is not the set that the run reads"):
        there.batch(0, 1)
    assert config.build(seq_len=8).digest != stream.digest


def test_a_set_built_again_is_told_by_its_card_wherever_it_differs(tmp_path: Path) -> None:
    config = DataConfig(sources=(Source(path=str(tmp_path / "set")),), split="1")
    entries = []
    for text in ("one and the same length", "two and the same length"):
        (tmp_path / "text.txt").write_text(text, encoding="utf-8")
        build([str(tmp_path / "text.txt")], str(tmp_path / "set"), Recipe(), replace=True)
        manifest, sets = make_manifest(config, seq_len=4, split="train")
        entries.append(manifest.sources[0])
        for one in sets:
            one.close()
    first, second = entries
    assert first.fingerprint == second.fingerprint
    assert first.tokens_digest != second.tokens_digest
    assert not first.holds_what(second)
