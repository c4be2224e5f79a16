"""Addresses of a coordinator."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.coord.address import Address, candidates, check_addresses, parse
from holdfast.coord.retries import failures_after, pause_s
from holdfast.errors import UsageError


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("tcp://127.0.0.1:4711", Address("127.0.0.1", 4711)),
        ("tcp://node-7.cluster:1", Address("node-7.cluster", 1)),
        ("tcp://[::1]:65535", Address("::1", 65535)),
        ("unix:/run/a b.sock", Address(path="/run/a b.sock")),
    ],
)
def test_an_address_is_read_and_written_the_same(text: str, place: Address) -> None:
    assert parse(text) == place
    assert str(place) == text


@pytest.mark.parametrize(
    "text",
    ["", "localhost:80", "tcp://host", "tcp://host:0", "tcp://host:65536", "tcp://::1:80", "unix:",
     "file:", "http://host:80", "tcp://host:80/x", "tcp://a b:80"],
)  # fmt: skip
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"tcp://HOST:PORT"):
        check_addresses(text)


def test_relative_paths_mean_this_folder_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = check_addresses(["file:run/address", "unix:sock"])
    assert found == (f"file:{tmp_path}/run/address", f"unix:{tmp_path}/sock")


def test_at_least_one_is_needed() -> None:
    with pytest.raises(UsageError, match="no address"):
        check_addresses([])


def test_a_file_is_read_at_each_attempt_and_may_be_missing(tmp_path: Path) -> None:
    file = tmp_path / "where"
    addresses = check_addresses([f"file:{file}", "unix:/a"])
    places, trouble = candidates(addresses)
    assert places == [Address(path="/a")]
    assert "No such file" in trouble
    file.write_text("tcp://h:1\nunix:/a\n")
    assert candidates(addresses) == ([Address("h", 1), Address(path="/a")], "")
    file.write_bytes(b"\xff\xfe nonsense")
    places, trouble = candidates(addresses)
    assert places == [Address(path="/a")]
    assert trouble


def test_the_first_attempt_is_made_at_once_and_pauses_have_an_end() -> None:
    assert pause_s(0, 0.9) == 0.0
    pauses = [pause_s(failures, 0.5) for failures in range(1, 100)]
    assert pauses == sorted(pauses)
    assert pauses[0] <= 0.05
    assert pauses[-1] <= 1.0
    assert pause_s(3, 0.0) < pause_s(3, 0.99)
    assert failures_after(5, welcomed=True, lasted_s=60.0) == 0
    assert failures_after(5, welcomed=True, lasted_s=0.1) == 3
    assert failures_after(5, welcomed=False, lasted_s=60.0) == 6
