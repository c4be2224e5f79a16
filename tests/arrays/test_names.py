"""Names round-trip, trees come back as they were, patterns select what they say."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.arrays import flatten, join, match, split, unflatten
from holdfast.errors import TreeError, UsageError
from tests.arrays.strategies import untimed


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    step: Any
    params: Any
    label: str = dataclasses.field(default="s", metadata={"static": True})
    derived: Any = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "derived", -1)


keys = st.text(st.sampled_from("ab~/012é"), max_size=4) | st.text(max_size=4)
trees = st.recursive(
    st.integers() | st.none() | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(st.integers(), inner, max_size=3)
        | st.builds(Point, inner, inner)
        | st.builds(State, inner, inner)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


@untimed
@given(st.lists(keys))
def test_join_and_split_are_inverses(path: list[str]) -> None:
    name = join(path)
    assert split(name) == tuple(path)
    assert join(split(name)) == name


@untimed
@given(st.lists(st.lists(keys), unique_by=tuple))
def test_names_are_unique(paths: list[list[str]]) -> None:
    assert len({join(path) for path in paths}) == len(paths)


def test_names_are_written_like_this() -> None:
    assert join(["params", "a/b", "c~d", "", "0"]) == "params/a~1b/c~0d/~2/0"
    assert join([]) == ""
    assert join(["~1"]) == "~01"


@pytest.mark.parametrize("name", ["a//b", "/a", "a/", "/", "a~", "~3", "~~0", "a/~2b"])
def test_what_join_never_makes_is_refused(name: str) -> None:
    with pytest.raises(TreeError, match="not a name"):
        split(name)


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(TreeError, match="not valid text"):
        join(["\ud800"])


@untimed
@given(trees)
def test_trees_come_back(tree: Any) -> None:
    leaves, rebuild = flatten(tree)
    names = [name for name, _ in leaves]
    assert len(set(names)) == len(names)
    back = rebuild([leaf for _, leaf in leaves])
    assert back == tree
    assert repr(back) == repr(tree)  # the same container types, all the way down
    assert all(leaf is not None for _, leaf in leaves)


def test_flatten_names_fields_and_indexes() -> None:
    tree = {"opt": Point([1, 2], None), 3: State(4, {"w": (5,)}), "empty": {}}
    leaves, rebuild = flatten(tree)
    assert leaves == [
        ("opt/x/0", 1),
        ("opt/x/1", 2),
        ("3/step", 4),
        ("3/params/w/0", 5),
        ("3/derived", -1),
    ]
    back = rebuild([10, 20, 30, 40, 50])
    assert back["opt"] == Point([10, 20], None)
    assert (back[3].step, back[3].derived, back[3].label) == (30, 50, "s")
    assert back["empty"] == {}
    with pytest.raises(UsageError, match="has 5 leaves, got 1"):
        rebuild([1])


def test_a_leaf_alone_has_the_empty_name() -> None:
    leaves, rebuild = flatten(7)
    assert leaves == [("", 7)]
    assert rebuild([8]) == 8
    assert unflatten({"": 7}) == 7
    assert flatten(None)[0] == []


def test_other_mappings_keep_their_kind() -> None:
    counts: defaultdict[str, Any] = defaultdict(list, a=1)
    leaves, rebuild = flatten({"d": counts, "p": MappingProxyType({"k": 2})})
    back = rebuild([3, 4])
    assert [name for name, _ in leaves] == ["d/a", "p/k"]
    assert back["d"]["new"] == []
    assert type(back["p"]) is MappingProxyType
    assert counts == {"a": 1}


def test_bad_trees_say_where() -> None:
    with pytest.raises(TreeError, match=r"keys 1 and '1' of 'a' have the same name"):
        flatten({"a": {1: 0, "1": 0}})
    with pytest.raises(TreeError, match=r"key 2.5 of '' is a float"):
        flatten({2.5: 0})
    with pytest.raises(TreeError, match="is a bool"):
        flatten({True: 0})
    loop: list[Any] = []
    loop.append({"again": loop})
    with pytest.raises(TreeError, match="'0/again' contains itself"):
        flatten(loop)
    shared = [1]
    assert len(flatten([shared, shared])[0]) == 2


@untimed
@given(st.dictionaries(keys, st.dictionaries(keys, st.integers(), min_size=1), min_size=1))
def test_unflatten_gives_nested_dicts(tree: dict[str, dict[str, int]]) -> None:
    assert unflatten(dict(flatten(tree)[0])) == tree


@pytest.mark.parametrize("order", [1, -1])
def test_a_leaf_has_nothing_under_it(order: int) -> None:
    with pytest.raises(TreeError, match="'a/b' is a leaf, so 'a/b/c'"):
        unflatten(dict([("a/b", {"c": 1}), ("a/b/c", 2)][::order]))
    with pytest.raises(TreeError, match="whole tree"):
        unflatten(dict([("", 1), ("a", 2)][::order]))


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("params", ["params", "params/w", "params/a/b"], ["params2/w", "opt/params"]),
        ("params/", ["params/w"], ["params2"]),
        ("*/w", ["a/w", "b/w/0"], ["w", "a/b/w"]),
        ("**/w", ["w", "a/w", "a/b/w", "a/w/0"], ["a/ww", "aw"]),
        ("a/**/w", ["a/w", "a/b/w", "a/b/c/w/1"], ["b/a/w", "aw"]),
        ("a/**", ["a", "a/b", "a/b/c"], ["ab", "b/a"]),
        ("**", ["a", "a/b", ""], []),
        ("", ["a", ""], []),
        ("layer?/[!b]*", ["layer1/w"], ["layer10/w", "layer1/bias", "layer1"]),
        ("layer[0-2]", ["layer0/w", "layer2"], ["layer3"]),
        ("a.b", ["a.b"], ["axb"]),
        ("a[", ["a["], ["a"]),
        ("a~1*", ["a~1b"], ["a/b"]),
        ("x**z", ["xyz", "x/y/z", "xz/0"], ["x/y"]),
    ],
)
def test_patterns(pattern: str, yes: list[str], no: list[str]) -> None:
    for name in yes:
        assert match(pattern, name), name
    for name in no:
        assert not match([pattern], name), name


def test_any_of_several_patterns_is_enough() -> None:
    assert match(["opt", "params"], "params/w")
    assert not match([], "params/w")
    with pytest.raises(UsageError, match="bad name pattern"):
        match("[z-a]", "z")
