"""Rules of names."""

from __future__ import annotations

import pytest

from holdfast.checkpoint.foreign import parsed_rules
from holdfast.checkpoint.foreign.renaming import renaming
from holdfast.errors import UsageError


@pytest.mark.parametrize(
    ("rules", "name", "expected"),
    [
        (["model=params"], "model/w", "params/w"),
        (["model=params"], "model", "params"),
        (["model=params"], "models/w", "models/w"),
        (["model=params"], "a/model/w", "a/model/w"),
        (["layers/*/w=blocks/*/kernel"], "layers/3/w", "blocks/3/kernel"),
        (["layers/*/w=blocks/*/kernel"], "layers/3/w/x", "blocks/3/kernel/x"),
        (["layers/*/*=*/*"], "layers/a/b/c", "a/b/c"),
        (["a=b", "a/c=d"], "a/c", "b/c"),
        (["model="], "model/w", "w"),
        (["=state"], "w", "state/w"),
        (["a.b=c"], "axb", "axb"),
    ],
)
def test_rules(rules: list[str], name: str, expected: str) -> None:
    assert renaming(parsed_rules(rules))(name) == expected


def test_a_function(tmp_path: object) -> None:
    assert renaming(str.upper)("a/b") == "A/B"
    with pytest.raises(UsageError, match="which is no name"):
        renaming(lambda name: None)("a")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["model", "a=*", "a=b//c"])
def test_what_is_no_rule(text: str) -> None:
    with pytest.raises(UsageError):
        renaming(parsed_rules([text]))("a")
