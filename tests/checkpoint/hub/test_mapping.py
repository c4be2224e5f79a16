"""Rules: what they say of shapes and elements, in both directions, and how they refuse."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from holdfast.arrays import dtype as dtype_of
from holdfast.checkpoint.hub.axes import parsed
from holdfast.checkpoint.hub.copying import copy
from holdfast.checkpoint.hub.mapping import Found, NameMap, Rule, leaf_of
from holdfast.checkpoint.hub.weaving import Woven
from holdfast.errors import UsageError
from tests.checkpoint.hub.repositories import Array

INT = dtype_of("int32")


def numbered(*shape: int, start: int = 0) -> Array:
    return np.arange(start, start + int(np.prod(shape)), dtype=np.int32).reshape(shape)


def put_together(woven: Woven, tensors: dict[str, Array]) -> Array:
    whole: Array = np.full(woven.shape, -1, np.int32)
    box = [(0, size) for size in woven.shape]
    for cell in woven.cells:
        source = tensors[cell.strand.tensor].reshape(-1).view(np.uint8)
        copy(cell.move(cell.lo, cell.hi, box), source, INT, whole.reshape(-1).view(np.uint8), INT)
    return whole


def leaf(rule: Rule, shape: tuple[int, ...], tensors: dict[str, Array]) -> Array:
    """The leaf that a rule makes; the shapes of its tensors follow from it alone where the rule says all."""
    woven, problems = leaf_of(Found(rule, {}), shape, lambda name: tensors[name].shape)
    assert woven is not None, problems
    return put_together(woven, tensors)


def test_queries_keys_and_values_of_grouped_heads_lie_side_by_side() -> None:
    kv, group, head, hidden = 2, 4, 8, 6
    q, k, v = numbered(64, 6), numbered(16, 6, start=1000), numbered(16, 6, start=2000)
    rule = Rule("qkv", ("q", "k", "v"), "(kv g d) h -> h kv g d", join="g", sizes={"kv": kv})
    got = leaf(rule, (hidden, kv, group + 2, head), {"q": q, "k": k, "v": v})
    parts = [one.reshape(kv, -1, head, hidden) for one in (q, k, v)]
    np.testing.assert_array_equal(got, np.concatenate(parts, axis=1).transpose(3, 0, 1, 2))


def test_a_fused_tensor_is_split_by_head_and_index() -> None:
    fused = numbered(4 * 3 * 5, 7)
    for at, name in enumerate("qkv"):
        rule = Rule(
            name, "f", "(h three d) c -> c (h d)", take=("three", at, at + 1), sizes={"three": 3, "h": 4}
        )
        got = leaf(rule, (7, 20), {"f": fused})
        np.testing.assert_array_equal(got, fused.reshape(4, 3, 5, 7)[:, at].reshape(20, 7).T)
    # As some models have it: all queries, then all keys, then all values.
    rule = Rule("k", "f", "(x d) c -> c x d", take=("x", 4, 8), sizes={"x": 12})
    np.testing.assert_array_equal(
        leaf(rule, (7, 4, 5), {"f": fused}), fused.reshape(12, 5, 7)[4:8].transpose(2, 0, 1)
    )


def test_layers_and_experts_are_stacked() -> None:
    tensors = {f"l.{n}.e.{e}.w": numbered(3, 4, start=100 * n + 1000 * e) for n in range(5) for e in range(2)}
    got = leaf(Rule("w", "l.{n}.e.{e}.w", "o i -> n e i o"), (5, 2, 4, 3), tensors)
    for n in range(5):
        for e in range(2):
            np.testing.assert_array_equal(got[n, e], tensors[f"l.{n}.e.{e}.w"].T)
    plain = leaf(Rule("w", "l.{n}.e.1.w"), (5, 3, 4), tensors)
    np.testing.assert_array_equal(plain, np.stack([tensors[f"l.{n}.e.1.w"] for n in range(5)]))
    some = leaf(Rule("w", "l.{n}.e.0.w", "o i -> i (n o)", numbers={"n": (4, 2)}), (4, 6), tensors)
    np.testing.assert_array_equal(some, np.concatenate([tensors[f"l.{n}.e.0.w"] for n in (4, 2)]).T)


def test_dims_of_one_come_and_go() -> None:
    tensors = {"w": numbered(3, 1, 4)}
    np.testing.assert_array_equal(
        leaf(Rule("w", "w", "a 1 b -> 1 b a"), (1, 4, 3), tensors)[0], tensors["w"][:, 0].T
    )


def test_an_export_knows_the_shapes_of_tensors_from_the_rule() -> None:
    rule = Rule("qkv", ("q", "k", "v"), "(kv g d) h -> h kv g d", join="g", parts=(4, 1, 1))
    woven, problems = leaf_of(Found(rule, {}), (6, 2, 6, 8), lambda _: None)
    assert woven is not None, problems
    assert [strand.shape for strand in woven.strands] == [(64, 6), (16, 6), (16, 6)]
    open_ = Rule("out", "o", "h (n d) -> n d h")
    assert leaf_of(Found(open_, {}), (2, 3, 4), lambda _: None)[0] is not None


@pytest.mark.parametrize(
    ("rule", "shape", "says"),
    [
        (Rule("w", "w", "a b -> b a"), (4, 7), r"w has the shape \[3, 4\], \[7, 4\] wanted"),
        (Rule("w", ("w", "w"), "a b -> b a", join="a"), (4, 7), r"shape \[4, 7\] wanted, \[4, 6\] in"),
        (Rule("w", "w", "a b -> b a"), (4, 3, 1), "is not what"),
        (Rule("w", "w", "(a b) c -> a b c", sizes={"a": 2}), (2, 2, 4), "has the shape"),
        (Rule("w", "u", "a (b c) -> (a b) c"), (6, 4), "leaves open how large a, b is"),
        (Rule("w", "l.{n}.w", numbers={"n": (1, 2)}), (3, 3, 4), "3 are stacked in the leaf"),
    ],
)
def test_what_does_not_fit_is_said(rule: Rule, shape: tuple[int, ...], says: str) -> None:
    woven, problems = leaf_of(Found(rule, {}), shape, {"w": (3, 4)}.get)
    assert woven is None
    assert re.search(says, "\n".join(problems)), problems


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: parsed("a b"), "no arrow"),
        (lambda: parsed("(a b -> a b"), "brackets"),
        (lambda: parsed("a) b -> a b"), "brackets .* do not match"),
        (lambda: parsed("a + b -> a b"), r"'\+ b'"),
        (lambda: parsed("a a -> a"), "twice"),
        (lambda: Rule("w", "w", "a b -> a"), "on one side only"),
        (lambda: Rule("w", ("a", "b")), "join"),
        (lambda: Rule("w", ("a", "b"), "a b -> a b", join="a", parts=(1,)), "parts"),
        (lambda: Rule("w", "w", "a b -> a b", sizes={"c": 3}), "'c'"),
        (lambda: Rule("w", "w", "a b -> a b", take=("a", 0, 2)), "takes"),
        (lambda: Rule("w", "w", take=("a", 0, 2)), "no pattern"),
        (lambda: Rule("w", ()), "no tensor"),
        (lambda: NameMap.from_json("[]"), "no mapping"),
        (lambda: NameMap.from_json('{"rules": [{"leaf": "a", "tensors": "b", "twist": 1}]}'), "no twist"),
        (
            lambda: NameMap.from_json('{"rules": [{"leaf": "a", "tensors": ["b", "c"]}]}'),
            "2 tensors and",
        ),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(make: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make()


def test_names_are_found_by_pattern_and_first_match() -> None:
    names = NameMap(
        [
            Rule("layers/{n}/{what*}/kernel", "model.layers.{n}.{what}.weight", "o i -> i o"),
            Rule("layers/0/attn/kernel", "special"),
        ],
        ignore=["*.inv_freq"],
    )
    exact = names.rule("layers/0/attn/kernel")
    assert exact is not None
    assert exact.rule.tensors == "special"
    other = names.rule("layers/12/mlp/kernel")
    assert other is not None
    assert other.bound == {"n": "12", "what": "mlp"}
    woven, _ = leaf_of(other, (2, 3), lambda _: None)
    assert woven is not None
    assert woven.strands[0].tensor == "model.layers.12.mlp.weight"
    assert names.rule("layers/x/mlp/kernel") is None
    assert names.ignores("model.rotary.inv_freq")
    assert not names.ignores("model.norm.weight")


def test_rules_are_read_from_json() -> None:
    text = """{"rules": [{"leaf": "k", "tensors": "f", "pattern": "(t d) c -> c d", "take": ["t", 1, 2],
               "sizes": {"t": 3}}, {"leaf": "w", "tensors": ["a", "b"], "pattern": "x y -> y x", "join": "x",
               "parts": [1, 2]}], "ignore": ["*.bias"], "rest": true}"""
    names = NameMap.from_json(text)
    fused = numbered(6, 4)
    found = names.rule("k")
    assert found is not None
    np.testing.assert_array_equal(leaf(found.rule, (4, 2), {"f": fused}), fused[2:4].T)
    assert names.rest
    assert names.ignores("a.bias")
