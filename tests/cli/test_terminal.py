"""Words, tables and progress."""

from __future__ import annotations

import pytest

from holdfast.cli import terminal
from holdfast.cli.terminal import Column, Styled
from holdfast.clock import ManualClock


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1023 * 1024, "1.0 MiB"),
        (3 * 2**30, "3.0 GiB"),
        (2**63 - 1, "8192.0 PiB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert terminal.size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (119, "119 s"),
        (120, "2 min"),
        (7_199, "119 min"),
        (7_200, "2 h"),
        (172_800, "2 d"),
        (-300, "in 5 min"),
    ],
)
def test_ages(seconds: float, text: str) -> None:
    assert terminal.age(seconds) == text


def test_moments_beyond_the_calendar() -> None:
    assert terminal.moment(1e18) == "1e+18 s since 1970"
    assert terminal.iso(1e18) is None


def test_unprintable_text_is_escaped() -> None:
    assert terminal.printable("naïve ☃") == "naïve ☃"
    assert terminal.printable("a\x1b[31m\x07\udcff") == "a\\x1b[31m\\x07\\udcff"


def test_a_plain_table_is_aligned_and_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    columns = (Column("NAME", fold=True), Column("N", right=True))
    terminal.say_table(columns, [("x" * 200, "1"), (Styled("a\nb", "red"), "22")], indent=2)
    assert capsys.readouterr().out.splitlines() == [
        f"  {'NAME':<200}   N",
        f"  {'x' * 200}   1",
        f"  {'a b':<200}  22",
    ]


def test_progress_off_a_terminal_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    clock = ManualClock()
    with terminal.progress("verifying step 7", 4 << 20, clock=clock.monotonic) as advance:
        advance(1 << 20)
        clock.advance(terminal.LINE_EVERY_S)
        advance(2 << 20)
        advance(3 << 20)
        clock.advance(terminal.LINE_EVERY_S)
        advance(5 << 20)
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.splitlines() == [
        "verifying step 7: 50% (2.0 MiB of 4.0 MiB)",
        "verifying step 7: 100% (4.0 MiB of 4.0 MiB)",
    ]


@pytest.mark.parametrize(("width", "spare"), [(80, False), (120, True)])
def test_spare_columns_make_room_for_what_folds(
    width: int, spare: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "_is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", str(width))
    columns = (Column("A"), Column("SPARE", spare=True), Column("TEXT", fold=True))
    terminal.say_table(columns, [("a" * 55, "s" * 20, "one two three four")])
    lines = capsys.readouterr().out.splitlines()
    assert ("SPARE" in lines[0]) is spare
    assert "one two three four" in lines[1]
    assert max(map(len, lines)) <= width


def test_counts() -> None:
    assert [terminal.count(number, "step") for number in (0, 1, 2_000)] == [
        "0 steps",
        "1 step",
        "2,000 steps",
    ]
    assert [terminal.count(number, "watch", "watches") for number in (1, 2)] == ["1 watch", "2 watches"]
