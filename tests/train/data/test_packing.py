"""Documents that share a sample: what counts, what sees what, and where positions start again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import DataError
from holdfast.train.data import DataConfig, Source
from holdfast.train.data.packing import document_starts, pack
from tests.train.data.sets import write_set

lengths = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(lambda found: sum(found) > 5)


@given(lengths=lengths, width=st.integers(2, 6), data=st.data())
def test_the_masks_are_those_of_a_walk_over_the_tokens(
    lengths: list[int], width: int, data: st.DataObject
) -> None:
    owner = [number for number, length in enumerate(lengths) for _ in range(length)]
    documents = np.cumsum([0, *lengths], dtype=np.int64)
    starts = data.draw(st.lists(st.integers(0, len(owner) - width), min_size=1, max_size=5))
    windows = np.array([range(start, start + width) for start in starts], np.int32)
    batch = pack(windows, document_starts(documents, np.array(starts, np.int64), width))
    for row, start in enumerate(starts):
        segment, position = 1, 0
        for column in range(width - 1):
            token = start + column
            if column and owner[token] != owner[token - 1]:
                segment, position = segment + 1, 0
            assert batch["tokens"][row, column] == token
            assert batch["targets"][row, column] == token + 1
            assert batch["segments"][row, column] == segment
            assert batch["positions"][row, column] == position
            assert batch["mask"][row, column] == (owner[token] == owner[token + 1])
            position += 1


def build(path: Path, **settings: object) -> DataConfig:
    # Three documents of 3, 4 and 6 tokens; 9 ends each.
    write_set(path / "set", [[1, 2, 9], [3, 4, 5, 9], [6, 7, 1, 2, 3, 9]], code="B")
    options = {"split": "1,0,0", "vocab_size": 10, **settings}
    return DataConfig(sources=(Source(path=str(path / "set")),), **options)  # type: ignore[arg-type]


def test_a_packed_sample(tmp_path: Path) -> None:
    batch = build(tmp_path).build(seq_len=12).batch(0, 1)
    assert {name: array.dtype.name for name, array in batch.items()} == {  # type: ignore[attr-defined]
        "tokens": "int32",
        "targets": "int32",
        "mask": "float32",
        "segments": "int32",
        "positions": "int32",
    }
    assert batch["tokens"].tolist() == [[1, 2, 9, 3, 4, 5, 9, 6, 7, 1, 2, 3]]
    assert batch["targets"].tolist() == [[2, 9, 3, 4, 5, 9, 6, 7, 1, 2, 3, 9]]
    assert batch["mask"].tolist() == [[1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1]]
    assert batch["segments"].tolist() == [[1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4]]


def test_documents_that_are_not_separated(tmp_path: Path) -> None:
    stream = build(tmp_path, separate=False).build(seq_len=12)
    assert not stream.separate
    batch = stream.batch(0, 1)
    assert batch["mask"].all()
    assert (batch["segments"] == 1).all()
    assert batch["positions"].tolist() == [list(range(12))]


def test_targets_that_do_not_count(tmp_path: Path) -> None:
    mask = build(tmp_path, loss_ignore=(3, 7)).build(seq_len=12).batch(0, 1)["mask"]
    assert mask.tolist() == [[1, 1, 0, 1, 1, 1, 0, 0, 1, 1, 0, 1]]
    with pytest.raises(DataError, match="loss_on_eod is false, but no token ends a document"):
        build(tmp_path, loss_on_eod=False).build(seq_len=12)
    tiny = DataConfig(loss_on_eod=False).build(seq_len=2048).batch(0, 8)
    kept = DataConfig().build(seq_len=2048).batch(0, 8)
    ends = tiny["targets"] == 256
    assert ends.any()
    assert not tiny["mask"][ends].any()
    assert kept["mask"][ends].all()
    assert np.array_equal(tiny["mask"][~ends], kept["mask"][~ends])


def test_a_document_of_several_sequences_is_one(tmp_path: Path) -> None:
    path = write_set(tmp_path / "set", [[1, 2], [3, 4], [5, 6, 7]], bounds=[0, 2, 3])
    stream = DataConfig(sources=(Source(path=path),), split="1", vocab_size=10).build(seq_len=6)
    assert stream.batch(0, 1)["segments"].tolist() == [[1, 1, 1, 1, 2, 2]]
