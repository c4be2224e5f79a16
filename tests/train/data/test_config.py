"""Settings: all mistakes at once, each with the setting to change; blends from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.errors import ConfigError, DataError
from holdfast.train.data import DataConfig, Source, Stage
from holdfast.train.data.blends import read_blend
from tests.train.data.sets import counting, write_set


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    for name in "abc":
        write_set(tmp_path / name, counting(10, 10))
    return tmp_path


def problems(seq_len: int = 8, **settings: Any) -> list[str]:
    return [str(problem) for problem in DataConfig(**settings).problems(seq_len)]


def test_the_default_works() -> None:
    assert problems() == []
    assert DataConfig().build(seq_len=64, split="valid").samples_per_epoch > 64


def test_it_is_made_from_json_and_back() -> None:
    config = DataConfig(
        sources=(Source(path="x", weight=2), Source(path="y", split="valid")),
        stages=(Stage(start=5, weights=(1.0,)),),
    )
    told = json.loads(msgspec.json.encode(config))
    assert msgspec.convert(told, DataConfig) == config


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"split": "949,50,1,1"}, "data.split is '949,50,1,1'; three shares, such as 949,50,1"),
        ({"split": "a,b"}, "data.split is 'a,b'"),
        ({"split": "0,0"}, "data.split is '0,0'"),
        ({"split": "5,-1"}, "data.split is '5,-1'"),
        ({"vocab_size": -1}, "data.vocab_size is -1"),
        ({"tokenizer": "no/such.json"}, "data.tokenizer is 'no/such.json'; byte, or the path"),
        ({"loss_ignore": (-100,)}, "data.loss_ignore is (-100,)"),
        ({"seq_len": 0}, "seq_len is 0"),
        ({"sources": ()}, "data.sources is empty"),
        ({"sources": (Source(weight=-1),)}, "data.sources[0].weight is -1"),
        ({"sources": (Source(weight=float("nan")),)}, "data.sources[0].weight is nan"),
        ({"sources": (Source(weight=0),)}, "data.sources gives no weight to any source of train"),
        ({"sources": (Source(split="valid"),)}, "data.sources gives no weight to any source of train"),
        ({"sources": (Source(split="vaild"),)}, "data.sources[0].split is 'vaild'; did you mean 'valid'?"),
        ({"sources": (Source(path="builtin:tny"),)}, "data.sources[0].path is 'builtin:tny'; did you mean"),
        ({"sources": (Source(path="dir/"),)}, "data.sources[0].path is 'dir/'; the prefix"),
        ({"sources": (Source(path="no"),)}, "data.sources[0].path names no token files: no.idx and no.bin"),
        (
            {"sources": (Source(), Source())},
            "has 2 sources of train called 'builtin:tiny'; give them a name=",
        ),
        (
            {"sources": (Source(split="train"), Source(split="valid"))},
            "data.sources puts builtin:tiny into more than one split",
        ),
        ({"sources": (Source(), Source(split="valid", name="v"))}, "into more than one split"),
        ({"stages": (Stage(start=0, weights=(1,)),)}, "data.stages start at [0]; above 0"),
        ({"stages": (Stage(start=9, weights=(1,)), Stage(start=9, weights=(1,)))}, "start at [9, 9]"),
        ({"stages": (Stage(start=9, weights=(1, 1)),)}, "has 2 weights for 1 sources of the training split"),
        ({"stages": (Stage(start=9, weights=(0,)),)}, "data.stages[0].weights is (0,)"),
        ({"blend": "no/such.json"}, "data.blend cannot be used: cannot read no/such.json"),
        ({"blend": "x.json", "sources": (Source(name="x"),)}, "data.blend is given beside data.sources"),
    ],
)
def test_every_mistake_names_its_setting(settings: dict[str, Any], found: str) -> None:
    assert any(found in problem for problem in problems(**settings)), problems(**settings)


def test_all_mistakes_are_reported_at_once() -> None:
    wrong = DataConfig(
        sources=(Source(path="no", weight=-1),), split="x", stages=(Stage(start=0, weights=()),)
    )
    with pytest.raises(ConfigError, match="7 mistakes"):
        wrong.build(seq_len=0)


def test_sources_of_one_split_each(sets: Path) -> None:
    config = DataConfig(
        sources=(
            Source(path=str(sets / "a"), split="train"),
            Source(path=str(sets / "b"), split="train", weight=3),
            Source(path=str(sets / "c"), split="valid"),
        ),
        vocab_size=100,
    )
    train, valid = config.build(seq_len=9), config.build(seq_len=9, split="valid")
    assert train.counts(400) == {"a": 100, "b": 300}
    assert valid.counts(7) == {"c": 7}
    assert valid.samples_per_epoch == 11  # all of it
    with pytest.raises(DataError, match="no source feeds the test split"):
        config.build(seq_len=9, split="test")


BLENDS: dict[str, Any] = {
    "split objects": {"train": {"a": 0.3, "b": 0.7}, "valid": {"c": 1}},
    "split lists": {"train": ["30", "a", "70", "b"], "valid": ["c"], "test": None},
    "numbers in lists": {"train": [0.3, "a", 0.7, "b"], "valid": [1, "c"]},
}


@pytest.mark.parametrize("form", BLENDS)
def test_blends_per_split(sets: Path, form: str) -> None:
    (sets / "blend.json").write_text(json.dumps(BLENDS[form]))
    found = read_blend(str(sets / "blend.json"))
    assert [(source.label, source.split) for source in found] == [
        ("a", "train"),
        ("b", "train"),
        ("c", "valid"),
    ]
    config = DataConfig(blend=str(sets / "blend.json"), vocab_size=100)
    assert config.build(seq_len=9).counts(1_000) == {"a": 300, "b": 700}
    assert config.build(seq_len=9, split="valid").counts(5) == {"c": 5}


def test_a_blend_that_is_cut(sets: Path) -> None:
    for told in ({"a": 1, "b": 3}, ["1", "a", "3", "b"]):
        (sets / "blend.json").write_text(json.dumps(told))
        config = DataConfig(blend=str(sets / "blend.json"), vocab_size=100, split="8,2")
        assert config.build(seq_len=9).counts(8) == {"a": 2, "b": 6}
        assert config.build(seq_len=9, split="valid").counts(8) == {"a": 2, "b": 6}
    (sets / "blend.json").write_text('["a", "builtin:tiny"]')
    assert [source.path for source in read_blend(str(sets / "blend.json"))] == [
        str(sets / "a"),
        "builtin:tiny",
    ]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "is not JSON"),
        ("3", "3 is neither an object nor a list"),
        ('{"train": 3}', "train: 3 is neither"),
        ('["1", "a", "b"]', "a weight before each path"),
        ('["a", "1"]', "a weight before each path"),
        ("[1, 2]", "2 stands where a path is expected"),
        ('{"a": "much"}', "a: the weight is 'much'"),
        ('{"a": -1}', "a: the weight is -1"),
        ('{"a": true}', "a: the weight is True"),
        ('["nan", "a"]', "a: the weight is nan"),
        ('[["a"]]', "stands where a path is expected"),
    ],
)
def test_blends_that_are_none(tmp_path: Path, text: str, what: str) -> None:
    file = tmp_path / "blend.json"
    file.write_text(text)
    with pytest.raises(DataError, match=r"blend\.json") as caught:
        read_blend(str(file))
    assert what in caught.value.message
    assert caught.value.hint
    assert any(what in problem for problem in problems(blend=str(file)))
