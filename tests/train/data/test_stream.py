"""Sample k is a pure function: of k, the seed and the manifest, and of nothing else."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ConfigError, DataError, UsageError
from holdfast.train.data import Batch, DataConfig, Ledger, Source, Stage, Stream
from holdfast.train.data.manifest import Manifest, document_range
from tests.train.data.sets import counting, write_set

SEQ = 8


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """Three sources of 300, 200 and 100 documents of 10 tokens; a token says where it comes from."""
    folder = tmp_path_factory.mktemp("sets")
    for at, (name, documents) in enumerate((("a", 300), ("b", 200), ("c", 100))):
        write_set(folder / name, counting(documents, 10, first=10_000 * at))
    sources = [
        Source(path=str(folder / name), weight=weight) for name, weight in zip("abc", (5, 3, 2), strict=True)
    ]
    return DataConfig(sources=tuple(sources), split="9,1", vocab_size=30_000)


def same(one: Any, two: Any) -> bool:
    return one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)


def joined(*batches: Batch) -> dict[str, npt.NDArray[Any]]:
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}  # type: ignore[literal-required]


@settings(max_examples=25)
@given(start=st.integers(0, 2_000), lengths=st.lists(st.integers(0, 12), min_size=1, max_size=4))
def test_a_batch_is_its_samples_however_it_is_cut(blend: DataConfig, start: int, lengths: list[int]) -> None:
    stream = blend.build(seq_len=SEQ, seed=1)
    bounds = np.cumsum([start, *lengths]).tolist()
    whole = stream.batch(bounds[0], bounds[-1])
    parts = [stream.batch(a, b) for a, b in pairwise(bounds)]
    assert same(whole, joined(*parts))
    ids = [stream.identities(a, b) for a, b in pairwise(bounds)]
    assert np.array_equal(stream.identities(bounds[0], bounds[-1]), np.concatenate(ids))
    stream.close()


@pytest.mark.parametrize("seq_len", [1, 7, 8, 64])
def test_an_epoch_has_every_window_of_a_source_once(blend: DataConfig, seq_len: int) -> None:
    alone = replace(blend, sources=blend.sources[1:2])
    stream = alone.build(seq_len=seq_len, seed=3)
    per_epoch = (180 * 10 - 1) // seq_len
    assert stream.samples_per_epoch == per_epoch
    epochs = [stream.batch(at * per_epoch, (at + 1) * per_epoch)["tokens"][:, 0] for at in range(3)]
    for firsts in epochs:
        assert sorted(firsts.tolist()) == [10_000 + at * seq_len for at in range(per_epoch)]
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[1], epochs[2])
    ids = stream.identities(0, 3 * per_epoch)
    assert len(np.unique(ids)) == 3 * per_epoch  # unlike their tokens, samples of later epochs are others


def test_the_mixture_is_kept_across_epochs_of_its_sources(blend: DataConfig) -> None:
    stream = blend.build(seq_len=SEQ)
    first = stream.batch(0, 2_000)["tokens"][:, 0] // 10_000
    assert np.bincount(first).tolist() == [1_000, 600, 400]
    assert stream.counts(2_000) == {"a": 1_000, "b": 600, "c": 400}
    assert len(np.unique(stream.identities(0, 2_000))) == 2_000


def test_seeds_give_orders_of_their_own(blend: DataConfig) -> None:
    ids = [blend.build(seq_len=SEQ, seed=seed).identities(0, 100) for seed in (0, 1, -1, 2**63)]
    assert len({tuple(one.tolist()) for one in ids}) == 4


def test_a_later_stage_and_a_new_source_change_nothing_before_them(blend: DataConfig) -> None:
    before = replace(blend, sources=blend.sources[:2])
    after = replace(
        blend,
        sources=(*blend.sources[:2], replace(blend.sources[2], weight=0)),
        stages=(Stage(start=250, weights=(1, 1, 8)),),
    )
    old, new = before.build(seq_len=SEQ, seed=5), after.build(seq_len=SEQ, seed=5)
    assert np.array_equal(old.identities(0, 250), new.identities(0, 250))
    assert same(old.batch(200, 250), new.batch(200, 250))
    assert old.digest != new.digest
    assert old.ledger(250) == new.ledger(250)  # which is what says that a run may go on with it
    assert old.ledger(251) != new.ledger(251)
    assert new.counts(1_250) == {"a": 156 + 100, "b": 94 + 100, "c": 800}
    first = new.batch(250, 1_250)["tokens"][:, 0] // 10_000
    assert np.bincount(first).tolist() == [100, 100, 800]


def test_files_may_move_and_names_decide(blend: DataConfig, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for source in blend.sources:
        for end in (".bin", ".idx"):
            (moved / f"{source.label}{end}").write_bytes(Path(f"{source.path}{end}").read_bytes())
    sources = tuple(replace(source, path=str(moved / source.label)) for source in blend.sources)
    here, there = blend.build(seq_len=SEQ), replace(blend, sources=sources).build(seq_len=SEQ)
    assert here.digest == there.digest
    assert same(here.batch(0, 50), there.batch(0, 50))
    renamed = tuple(replace(source, name=f"{source.label}2") for source in sources)
    assert replace(blend, sources=renamed).build(seq_len=SEQ).digest != here.digest


def test_splits_share_no_document_and_stay(blend: DataConfig) -> None:
    train, valid = (blend.build(seq_len=SEQ, split=split) for split in ("train", "valid"))
    seen = [
        set((stream.batch(0, 4 * stream.samples_per_epoch)["tokens"] // 10).ravel().tolist())
        for stream in (train, valid)
    ]
    assert not seen[0] & seen[1]
    assert seen[1] == {*range(270, 300), *range(1_180, 1_200), *range(2_090, 2_100)}
    other = replace(blend, stages=(Stage(start=3, weights=(0, 0, 1)),)).build(seq_len=SEQ, split="valid")
    assert same(valid.batch(0, 40), other.batch(0, 40))  # stages are of training


@given(
    documents=st.integers(0, 10_000), shares=st.lists(st.integers(0, 999), min_size=1, max_size=3).filter(any)
)
def test_splits_cover_all_documents(documents: int, shares: list[int]) -> None:
    text = ",".join(map(str, shares))
    ranges = [document_range(text, documents, split) for split in ("train", "valid", "test")]
    assert ranges[0][0] == 0
    assert ranges[2][1] == documents
    for (_, end), (start, _) in pairwise(ranges):
        assert end == start
    for (start, end), share in zip(ranges, [*shares, 0, 0], strict=False):
        assert abs(end - start - documents * share / sum(shares)) <= 1


def test_a_process_without_data_knows_the_order(blend: DataConfig, tmp_path: Path) -> None:
    full = blend.build(seq_len=SEQ, seed=2)
    manifest = Manifest.from_json(full.manifest.to_json())
    sources = tuple(replace(entry, path=str(tmp_path / "nothing")) for entry in manifest.sources)
    bare = blend.build(seq_len=SEQ, seed=2, manifest=replace(manifest, sources=sources))
    assert bare.digest == full.digest
    assert np.array_equal(bare.identities(100, 200), full.identities(100, 200))
    assert bare.vocab_size == 30_000
    with pytest.raises(DataError, match=r"cannot read .*nothing\.idx"):
        bare.batch(0, 1)
    lazy = blend.build(seq_len=SEQ, seed=2, manifest=manifest)
    assert same(lazy.batch(0, 9), full.batch(0, 9))
    with pytest.raises(
        UsageError, match="manifest is of the train split in samples of 8 tokens, not of valid"
    ):
        blend.build(seq_len=SEQ, split="valid", manifest=manifest)
    with pytest.raises(UsageError, match="not the manifest"):
        Manifest.from_json(b"{}")


def test_another_set_of_the_same_name_is_refused(tmp_path: Path) -> None:
    path = write_set(tmp_path / "set", counting(10, 10))
    config = DataConfig(sources=(Source(path=path),), vocab_size=1_000, split="1")
    manifest = config.build(seq_len=SEQ).manifest
    write_set(tmp_path / "set", counting(20, 5))
    with pytest.raises(DataError, match="is not the set that the run reads"):
        config.build(seq_len=SEQ, manifest=manifest).batch(0, 1)


def test_a_closed_stream_and_ranges_that_are_none(blend: DataConfig) -> None:
    stream = blend.build(seq_len=SEQ)
    for start, stop in ((-1, 3), (5, 4)):
        with pytest.raises(UsageError, match="no samples from"):
            stream.batch(start, stop)
    assert stream.batch(7, 7)["tokens"].shape == (0, SEQ)
    stream.close()
    stream.close()
    assert len(stream.identities(0, 3)) == 3
    with pytest.raises(UsageError, match="closed"):
        stream.batch(0, 1)


def test_a_split_without_a_sample_says_what_would_work(blend: DataConfig) -> None:
    with pytest.raises(
        DataError, match=r"valid split of .*c has 100 tokens in 10 of 100 documents"
    ) as caught:
        blend.build(seq_len=100, split="valid")
    assert "data.split" in str(caught.value.hint)
    with pytest.raises(DataError, match="test split"):
        blend.build(seq_len=SEQ, split="test")
    with pytest.raises(ConfigError, match="split is 'trian'; did you mean 'train'"):
        blend.build(seq_len=SEQ, split="trian")


def test_vocabularies(blend: DataConfig) -> None:
    with pytest.raises(DataError, match="do not say how large their vocabulary is"):
        replace(blend, vocab_size=0).build(seq_len=SEQ)
    assert replace(blend, vocab_size=0, tokenizer="byte").build(seq_len=SEQ).vocab_size == 257
    assert DataConfig().build(seq_len=SEQ).vocab_size == 257
    assert DataConfig(vocab_size=512).build(seq_len=SEQ).vocab_size == 512
    with pytest.raises(DataError, match=r"has a vocabulary of 257; data\.vocab_size is 256"):
        DataConfig(vocab_size=256).build(seq_len=SEQ)


def streams(blend: DataConfig) -> dict[str, Stream]:
    staged = replace(
        blend, stages=(Stage(start=100, weights=(1, 0, 2)), Stage(start=333, weights=(0.2, 0.7, 0.1)))
    )
    return {
        "tiny": DataConfig().build(seq_len=128, seed=0),
        "tiny valid": DataConfig().build(seq_len=128, seed=0, split="valid"),
        "tiny joined": DataConfig(separate=False).build(seq_len=100, seed=7),
        "staged": staged.build(seq_len=SEQ, seed=42),
    }


# Digests of: the manifest, the ledger after 10,000 samples, the arrays of the first 500, identities far out.
GOLDEN = {
    "tiny": (
        "8561eca255c222375dcbf4433e5e133d",
        "8cbd2b3c00b1976275a87ccb72940bcd",
        "f4bc6754a3f3d927c4deb1058c6cc9ee",
        "df8709ab716634037c1b75106f41f21d",
    ),
    "tiny valid": (
        "de3fc376a46130e6feb20fc3a493580a",
        "562a4c3d6288510b74bebec07a8d38d8",
        "567067b0d88adff0509a282592039890",
        "4118352b6387fff14b597230d0b7c90e",
    ),
    "tiny joined": (
        "064d925c25f115a06f3bc2b7170c238e",
        "327aea06bbc9dd44a0cfea292478ae67",
        "35b3feb7844f9a543d31da743ce4f353",
        "859185520efe96b07608d519ae7ee3c9",
    ),
    "staged": (
        "d6dad656509e1cdc6cbb4af54b44f3e0",
        "f52189380785d040c6528b1dc8c09a99",
        "5fda62fec400e05702b8282e9a2c04fa",
        "ead8fa243e5bb0fe5f9af9906e2d2766",
    ),
}


@pytest.mark.parametrize("name", ["tiny", "tiny valid", "tiny joined", "staged"])
def test_streams_are_what_they_have_always_been(blend: DataConfig, name: str) -> None:
    """A change here breaks every run that goes on from a checkpoint."""
    stream = streams(blend)[name]
    running = xxhash.xxh3_128()
    for array in stream.batch(0, 500).values():
        running.update(np.ascontiguousarray(array).tobytes())
    far = xxhash.xxh3_128_hexdigest(stream.identities(10**12, 10**12 + 100).tobytes())
    assert (stream.digest, stream.ledger(10_000).digest, running.hexdigest(), far) == GOLDEN[name]


def test_the_ledger_of_a_run_is_the_one_that_the_stream_says(blend: DataConfig) -> None:
    stream = blend.build(seq_len=SEQ, seed=9)
    ledger = Ledger.empty()
    for start, stop in ((0, 64), (64, 65), (65, 300)):
        ledger = ledger.advance(start, stop, stream.identities(start, stop))
    assert ledger == stream.ledger(300)


def test_speed(blend: DataConfig) -> None:
    """Bounds far above what it takes (0.02 s and 4 ms of CPU time), far below what would hurt."""
    stream = blend.build(seq_len=SEQ)
    begin = time.process_time()
    stream.identities(10**9, 10**9 + 100_000)
    assert time.process_time() - begin < 0.5
    tiny = DataConfig().build(seq_len=2048)
    tiny.batch(0, 64)
    begin = time.process_time()
    for at in range(10):
        tiny.batch(64 * at, 64 * at + 64)
    assert (time.process_time() - begin) / 10 < 0.1
