"""Scenarios, one for each race that coordination services have had; see scenarios/*.txt.

To write one, write its commands with `----` where output is wanted, run this with HOLDFAST_REWRITE=1, and
read what it came to.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.testing.coordination.stage import SceneError, play

SCENES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", SCENES, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    played = play(text)
    if os.environ.get("HOLDFAST_REWRITE"):
        path.write_text(played, encoding="utf-8")
    assert played == text


def test_a_scenario_says_where_it_is_wrong() -> None:
    with pytest.raises(SceneError, match=r"line 2, 'dance': .*no such command"):
        play("settings min_size=1\ndance\n")
    with pytest.raises(SceneError, match="`settings` comes first"):
        play("start a\n")


def test_a_scenario_shows_what_really_happened() -> None:
    assert play(
        "settings min_size=1 max_size=1\nstart a\na: set k v\nrun 1\n----\nwrong\n\nshow keys\n----\n"
    ) == (
        "settings min_size=1 max_size=1\nstart a\na: set k v\nrun 1\n----\na set k v: done\n\n"
        "show keys\n----\nk = v\n"
    )
