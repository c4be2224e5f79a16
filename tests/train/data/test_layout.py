"""Indexed files: read as published, written as published, and every damaged field named."""

from __future__ import annotations

import os
import random
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import DataError
from holdfast.train.data import DataConfig, Source
from holdfast.train.data.inspection import overview, verify
from holdfast.train.data.layout import encode_index, read_index
from holdfast.train.data.tokenizer import ByteTokenizer
from holdfast.train.data.tokens import TokenFiles
from holdfast.train.data.writer import TokenWriter, token_dtype
from tests.train.data.sets import index_bytes, write_set

DOCUMENTS = [[1, 2, 3], [4, 5], [], [6, 7, 8, 9]]


def documents_of(path: str) -> list[list[int]]:
    tokens = TokenFiles(path)
    found = []
    for start, end in pairwise(tokens.documents):
        window = np.empty(int(end - start), tokens.dtype)
        tokens.window(int(start), window)
        found.append(window.tolist())
    tokens.close()
    return found


@pytest.mark.parametrize("code", "BbhiqH")
def test_files_of_others_are_read(tmp_path: Path, code: str) -> None:
    assert documents_of(write_set(tmp_path / "set", DOCUMENTS, code=code)) == DOCUMENTS


@given(lengths=st.lists(st.integers(0, 1000), max_size=20))
def test_the_index_is_written_byte_by_byte_as_published(lengths: list[int]) -> None:
    for dtype, code in (("<u2", "H"), ("<i4", "i")):
        assert encode_index(np.dtype(dtype), np.array(lengths, np.int32)) == index_bytes(lengths, code=code)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = str(tmp_path / "set")
    documents = [b"one", b"", "drei äöü".encode(), bytes(range(256))]
    with TokenWriter(path, ByteTokenizer()) as writer:
        for tokens in ByteTokenizer().encode(documents):
            writer.add(tokens)
        card = writer.finish()
    assert documents_of(path) == [[*document, 256] for document in documents]
    assert (card.documents, card.tokens, card.eod) == (4, 3 + 0 + 11 + 256 + 4, 256)
    assert sorted(os.listdir(tmp_path)) == ["set.bin", "set.idx", "set.json"]
    verify(path)


def test_ids_are_as_wide_as_the_vocabulary() -> None:
    assert [token_dtype(size).name for size in (257, 65_499, 65_500, 200_000)] == [
        "uint16",
        "uint16",
        "int32",
        "int32",
    ]


def test_modes_of_text_are_skipped_and_others_refused(tmp_path: Path) -> None:
    path = write_set(tmp_path / "set", DOCUMENTS)
    index = tmp_path / "set.idx"
    index.write_bytes(index.read_bytes() + bytes(4))
    assert documents_of(path) == DOCUMENTS
    index.write_bytes(index.read_bytes()[:-1] + b"\1")
    with pytest.raises(DataError, match="sequence 3 has mode 1: not text"):
        TokenFiles(path)


DOCUMENTS_AT = 34 + 4 * 4 + 8 * 4
END = DOCUMENTS_AT + 8 * 5


def refusal(path: str) -> DataError | None:
    try:
        read_index(f"{path}.idx", f"{path}.bin")
    except DataError as error:
        return error
    return None


def test_every_flipped_bit_of_an_index_is_found_and_its_place_is_named(tmp_path: Path) -> None:
    """A bound between documents is the one thing that nothing contradicts."""
    path = write_set(tmp_path / "set", DOCUMENTS)
    index = tmp_path / "set.idx"
    whole = index.read_bytes()
    assert len(whole) == END
    for at in range(END):
        for bit in (0, 3, 7):
            index.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            if (error := refusal(path)) is not None:
                assert f"{error.file}, byte {error.offset:,}: " in error.message
                assert error.hint
            else:
                assert DOCUMENTS_AT + 8 <= at < END - 8, f"byte {at}, bit {bit} went unnoticed"


@pytest.mark.parametrize(
    ("at", "value", "offset", "what"),
    [
        (0, b"MMIDIDY\0\0", 0, "begins with b'MMIDIDY"),
        (9, struct.pack("<Q", 2), 9, "version 2"),
        (17, b"\x07", 17, "float32 elements"),
        (17, b"\x63", 17, "dtype code 99"),
        (17, b"\x04", 58, "sequence 1 begins at byte 6"),
        (18, struct.pack("<Q", 2**63), 122, "ends early"),
        (18, struct.pack("<Q", 3), 110, "has bytes behind its end"),
        (26, struct.pack("<Q", 0), 26, "no document bounds"),
        (26, struct.pack("<Q", 2**64 - 1), 122, "ends early"),
        (34, struct.pack("<i", -3), 34, "sequence 0 has -3 tokens"),
        (46, struct.pack("<i", 5), 18, "ends early"),
        (58, struct.pack("<q", 7), 58, "sequence 1 begins at byte 7"),
        (50, struct.pack("<q", 2), 50, "sequence 0 begins at byte 2"),
        (82, struct.pack("<q", 1), 82, "first document begins at sequence 1"),
        (98, struct.pack("<q", 4), 106, "document 3 begins at sequence 3, before"),
        (98, struct.pack("<q", 2**62), 106, "document 3 begins at sequence 3, before"),
        (114, struct.pack("<q", 3), 114, "last document ends at sequence 3 of 4"),
    ],
)
def test_each_field(tmp_path: Path, at: int, value: bytes, offset: int, what: str) -> None:
    path = write_set(tmp_path / "set", DOCUMENTS)
    index = tmp_path / "set.idx"
    data = bytearray(index.read_bytes())
    data[at : at + len(value)] = value
    index.write_bytes(data)
    with pytest.raises(DataError, match=what) as caught:
        DataConfig(sources=(Source(path=path),), vocab_size=10, split="1").build(seq_len=2)
    assert caught.value.offset == offset


def test_files_that_end_early_or_late(tmp_path: Path) -> None:
    path = write_set(tmp_path / "set", DOCUMENTS)
    for end in (".idx", ".bin"):
        file = tmp_path / f"set{end}"
        whole = file.read_bytes()
        for size in range(len(whole)):
            file.write_bytes(whole[:size])
            with pytest.raises(DataError, match=rf"set{end}, byte {size}: ends") as caught:
                TokenFiles(path)
            assert (caught.value.file, caught.value.offset) == (str(file), size)
        file.write_bytes(whole + b"\0")
        with pytest.raises(DataError, match="has bytes behind its end"):
            TokenFiles(path)
        file.unlink()
        with pytest.raises(DataError, match=rf"cannot read .*set{end}: No such file"):
            TokenFiles(path)
        file.write_bytes(whole)


def test_a_card_of_another_set_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "set")
    with TokenWriter(path, ByteTokenizer()) as writer:
        for tokens in ByteTokenizer().encode([b"one", b"two"]):
            writer.add(tokens)
        writer.finish()
    index = tmp_path / "set.idx"
    index.write_bytes(index_bytes([4, 4], bounds=[0, 0, 2]))  # what nothing else could tell
    with pytest.raises(DataError, match=r"set\.json has 2, 8 and"):
        overview(path)
    (tmp_path / "set.json").write_bytes(b'{"format": "holdfast tokens"}')
    with pytest.raises(DataError, match="not the card of a token set"):
        overview(path)
    (tmp_path / "set.json").unlink()
    assert overview(path).vocab_size is None


def test_tokens_outside_of_the_vocabulary_are_named(tmp_path: Path) -> None:
    path = write_set(tmp_path / "set", [[1, 2, 3, 10], [5, 6, 7]])
    stream = DataConfig(sources=(Source(path=path),), vocab_size=10, split="1").build(seq_len=6)
    with pytest.raises(DataError, match=r"set\.bin, byte 6: token id 10, in a vocabulary of 10") as caught:
        stream.batch(0, 1)
    assert caught.value.offset == 6
    path = write_set(tmp_path / "wide", [[1, 2, 2**40, 4]], code="q")
    stream = DataConfig(sources=(Source(path=path),), vocab_size=10, split="1").build(seq_len=3)
    with pytest.raises(DataError, match="byte 16: token id 1,099,511,627,776"):
        stream.batch(0, 1)
    path = write_set(tmp_path / "minus", [[1, -2, 2, 4]], code="i")
    stream = DataConfig(sources=(Source(path=path),), vocab_size=10, split="1").build(seq_len=3)
    with pytest.raises(DataError, match="byte 4: token id -2"):
        stream.batch(0, 1)


def test_a_file_that_is_cut_off_while_in_use(tmp_path: Path) -> None:
    path = write_set(tmp_path / "set", [[1] * 100])
    stream = DataConfig(sources=(Source(path=path),), vocab_size=10, split="1").build(seq_len=99)
    os.truncate(f"{path}.bin", 50)
    with pytest.raises(DataError, match="byte 50: ends early, 150 bytes are missing"):
        stream.batch(0, 1)


def test_flipped_tokens_are_found_by_a_full_check(tmp_path: Path) -> None:
    path = str(tmp_path / "set")
    with TokenWriter(path, ByteTokenizer()) as writer:
        for tokens in ByteTokenizer().encode([b"some text"] * 10):
            writer.add(tokens)
        writer.finish()
    file = tmp_path / "set.bin"
    whole = file.read_bytes()
    for seed in range(20):
        at = random.Random(seed).randrange(len(whole))
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DataError, match=r"set\.bin, byte \d+: (the digest of all tokens|token id)"):
            verify(path)


@pytest.mark.full
def test_rubbish_is_refused(tmp_path: Path) -> None:
    path = write_set(tmp_path / "set", DOCUMENTS)
    index = tmp_path / "set.idx"
    whole = index.read_bytes()
    dice = random.Random(1)
    for _ in range(5_000):
        data = bytearray(whole)
        for _ in range(dice.randint(1, 8)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        index.write_bytes(bytes(data[: dice.randint(0, len(data))]) if dice.random() < 0.3 else bytes(data))
        try:
            found = read_index(f"{path}.idx", f"{path}.bin")
        except DataError:
            continue
        assert found.num_tokens == 9
        assert (np.diff(found.documents) >= 0).all()
