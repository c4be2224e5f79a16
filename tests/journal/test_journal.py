"""The journal in one process: what is appended is read back, whatever happens to the file."""

from __future__ import annotations

import logging
import os
import signal
import statistics
import threading
import time
import typing
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdfast.clock import ManualClock
from holdfast.errors import DeadlineError, MissingPathError
from holdfast.journal import (
    BlockBad,
    Dropped,
    Event,
    Journal,
    Record,
    SaveCaptured,
    SaveFailed,
    SaveStarted,
    Unknown,
    follow,
    read,
)
from holdfast.journal.record import MAX_LINE, decode, encode

VALUES: dict[Any, Any] = {
    int: 7,
    float: 0.5,
    bool: True,
    str: "disk\nfull\t“é”",
    tuple[int, ...]: (1, 2),
    tuple[str, ...]: ("a/b", "c"),
    int | None: None,
}
"""A value of each type that a field of an event has."""


def one_of(kind: type[Event]) -> Event:
    """An event of a kind, with something in every field."""
    hints = typing.get_type_hints(kind)
    return kind(**{name: VALUES[hints[name]] for name in kind.__struct_fields__})


def events(path: Path) -> list[Event | Unknown]:
    return [record.event for record in read(path)]


def append_all(path: Path, *appended: Event) -> None:
    with Journal(path) as writer:
        for event in appended:
            writer.append(event)


def line(event: dict[str, object], **changes: object) -> bytes:
    body = msgspec.json.encode({"t": 1.0, "m": 2.0, "pid": 3, "component": "x", "event": event})
    return body + b"\t" + xxhash.xxh3_64_hexdigest(body).encode() + b"\n"


def test_every_kind_comes_back_as_it_was(tmp_path: Path) -> None:
    appended = [one_of(kind) for kind in typing.get_args(Event)]
    append_all(tmp_path / "journal", *appended)
    assert events(tmp_path / "journal") == appended


def test_record_says_when_who_and_where(tmp_path: Path) -> None:
    clock = ManualClock(monotonic=3.5, wall=1000.25)
    with Journal(tmp_path / "journal", component="vault", clock=clock) as writer:
        writer.append(SaveStarted(step=1))
    assert list(read(tmp_path / "journal")) == [
        Record(1000.25, 3.5, os.getpid(), "vault", SaveStarted(step=1))
    ]


def test_file_and_folders_appear_with_the_first_event(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "r1" / "journal"
    with Journal(path) as writer:
        assert writer.flush(10.0)
        assert not path.parent.exists()
        writer.append(SaveStarted(step=1))
        assert writer.flush(10.0)
        assert events(path) == [SaveStarted(step=1)]


def test_closed_journal_takes_no_more_and_says_nothing(tmp_path: Path) -> None:
    writer = Journal(tmp_path / "journal")
    writer.append(SaveStarted(step=1))
    assert writer.close(10.0)
    writer.append(SaveStarted(step=2))
    assert writer.flush(10.0)
    assert writer.close(10.0)
    assert events(tmp_path / "journal") == [SaveStarted(step=1)]


def test_threads_share_a_journal(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal") as writer:

        def work(base: int) -> None:
            for step in range(base, base + 200):
                writer.append(SaveStarted(step=step))

        threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
    seen = [event.step for event in events(tmp_path / "journal") if isinstance(event, SaveStarted)]
    assert len(seen) == 1600
    for base in range(0, 8000, 1000):
        assert [step for step in seen if step // 1000 == base // 1000] == [*range(base, base + 200)]


@pytest.mark.process
def test_append_works_from_a_signal_handler(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal") as writer:

        def handle(number: int, frame: FrameType | None) -> None:
            writer.append(SaveStarted(step=-1))

        before = signal.signal(signal.SIGALRM, handle)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
            for step in range(20_000):
                writer.append(SaveStarted(step=step))
                if step % 1000 == 0:
                    assert writer.flush(10.0)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    seen = [event for event in events(tmp_path / "journal") if event != SaveStarted(step=-1)]
    assert seen == [SaveStarted(step=step) for step in range(20_000)]


# What a crash, a full disk or a bad disk leaves behind.


@pytest.mark.parametrize("cut", [1, 2, 10, 40])
def test_torn_tail_costs_one_line_and_the_next_writer_starts_afresh(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal"
    append_all(path, SaveStarted(step=1), SaveStarted(step=2))
    path.write_bytes(path.read_bytes()[:-cut])
    append_all(path, SaveStarted(step=3))
    reading = read(path)
    kept = [record.event for record in reading]
    if cut == 1:  # only the newline is gone: the line is whole
        assert kept == [SaveStarted(step=1), SaveStarted(step=2), SaveStarted(step=3)]
        assert reading.damaged == 0
    else:
        assert kept == [SaveStarted(step=1), SaveStarted(step=3)]
        assert reading.damaged == 1


def test_any_damaged_byte_costs_at_most_the_lines_it_touches(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    append_all(path, *(SaveStarted(step=step) for step in range(3)))
    good = path.read_bytes()
    for position in range(len(good)):
        damaged = bytearray(good)
        damaged[position] ^= 0x15
        path.write_bytes(damaged)
        reading = read(path)
        kept = [record.event for record in reading]
        assert reading.damaged in (1, 2)
        assert all(event in [SaveStarted(step=step) for step in range(3)] for event in kept)
        assert len(kept) >= (1 if good[position] == ord("\n") else 2)


@given(st.binary(max_size=200))
def test_no_bytes_break_the_decoder(data: bytes) -> None:
    assert decode(data) is None
    # With a right checksum, the parser itself is what must not break.
    assert decode(data + b"\t" + xxhash.xxh3_64_hexdigest(data).encode()) is None


def test_endless_line_is_one_damaged_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    append_all(path, SaveStarted(step=1))
    with path.open("ab") as file:
        file.write(b"x" * (3 * MAX_LINE + (5 << 20)))
    append_all(path, SaveStarted(step=2))
    reading = read(path)
    assert [record.event for record in reading] == [SaveStarted(step=1), SaveStarted(step=2)]
    assert reading.damaged == 1


def test_events_from_other_versions_come_back_untyped(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(
        line({"kind": "Teleported", "to": [1, 2]})
        + line({"kind": "SaveStarted", "stride": 5})
        + line({"kind": "SaveStarted", "step": 5, "added_later": True})
        + line({"no": "kind"})
    )
    reading = read(path)
    assert [record.event for record in reading] == [
        Unknown("Teleported", {"to": [1, 2]}),
        Unknown("SaveStarted", {"stride": 5}),
        SaveStarted(step=5),
        Unknown("", {"no": "kind"}),
    ]
    assert reading.damaged == 0


def test_huge_event_is_clipped_not_lost() -> None:
    names = tuple(f"layer{n}/" + "w" * 300 for n in range(5000))
    record = decode(encode(1.0, 2.0, 3, "x", BlockBad("p0", 1, names, "é" * 500_000))[:-1])
    assert record is not None
    assert isinstance(record.event, BlockBad)
    assert record.event.block == 1
    assert record.event.arrays[-1] == "… and 4900 more"
    assert record.event.reason.startswith("éé")
    assert len(encode(1.0, 2.0, 3, "x", BlockBad("\0" * 9999, 1, ("\0" * 999,) * 9999, ""))) < MAX_LINE


def test_reading_what_is_not_there_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(MissingPathError):
        next(read(tmp_path / "journal"))


# A disk that refuses.


def test_full_disk_never_raises_drops_and_recovers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "journal"
    path.symlink_to("/dev/full")
    writer = Journal(path, capacity=100)
    writer.append(SaveStarted(step=0))
    assert not writer.flush(0.2)
    for step in range(1, 1000):
        writer.append(SaveStarted(step=step))
    path.unlink()  # space is back: the next try opens a real file
    assert writer.flush(10.0)
    writer.append(SaveStarted(step=1000))
    assert writer.close(10.0)

    seen = events(path)
    kept = [event for event in seen if isinstance(event, SaveStarted)]
    dropped = sum(event.count for event in seen if isinstance(event, Dropped))
    assert len(kept) + dropped == 1001
    assert kept[:50] == [SaveStarted(step=step) for step in range(50)]
    assert kept[-1] == SaveStarted(step=1000)
    assert dropped > 800
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "No space left" in warnings[0].getMessage()


def test_closing_on_a_refusing_disk_is_quick_and_honest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    writer = Journal(tmp_path / "file" / "journal")  # a file stands where a folder is needed
    writer.append(SaveStarted(step=1))
    before = time.monotonic()
    assert not writer.close(10.0)
    assert time.monotonic() - before < 5.0
    assert len(caplog.records) == 1


def test_read_only_file_system(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = threading.Event()

    def refuse(self: object, lines: list[bytes]) -> list[bytes]:
        refused.set()
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr("holdfast.journal.writer._File.write", refuse)
        writer = Journal(tmp_path / "journal")
        writer.append(SaveStarted(step=1))
        assert refused.wait(10.0)
        assert not writer.flush(0.0)
    assert writer.close(10.0)  # writable again: nothing was lost
    assert events(tmp_path / "journal") == [SaveStarted(step=1)]
    assert "Read-only" in caplog.text


def test_removed_file_is_made_again_but_a_removed_folder_is_not(tmp_path: Path) -> None:
    path = tmp_path / "run" / "journal"
    writer = Journal(path)
    writer.append(SaveStarted(step=1))
    assert writer.flush(10.0)
    path.unlink()
    writer.append(SaveStarted(step=2))
    assert writer.flush(10.0)
    assert events(path) == [SaveStarted(step=2)]
    path.unlink()
    path.parent.rmdir()
    writer.append(SaveStarted(step=3))
    assert not writer.close(10.0)
    assert not path.parent.exists()


def test_event_that_json_cannot_hold_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    append_all(path, SaveStarted(step=1), SaveFailed(step=2, reason="\ud800"), SaveStarted(step=3))
    seen = events(path)
    assert [event for event in seen if isinstance(event, SaveStarted)] == [
        SaveStarted(step=1),
        SaveStarted(step=3),
    ]
    assert Dropped(count=1) in seen


# Live readers.


def test_follow_waits_for_a_file_that_does_not_exist_yet(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    records = follow(path, timeout_s=30.0)
    with Journal(path) as writer:
        for step in range(3):
            writer.append(SaveStarted(step=step))
            assert next(records).event == SaveStarted(step=step)


def test_follow_holds_back_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    whole = encode(1.0, 2.0, 3, "x", SaveStarted(step=1))
    path.write_bytes(whole[:20])
    polls = 0

    def finish_the_line_at_the_third_poll() -> bool:
        nonlocal polls
        polls += 1
        if polls == 3:
            with path.open("ab") as file:
                file.write(whole[20:])
        return polls > 3

    reading = follow(path, timeout_s=30.0, stop=finish_the_line_at_the_third_poll)
    assert [record.event for record in reading] == [SaveStarted(step=1)]
    assert reading.damaged == 0


def test_follow_gives_out_what_was_written_before_the_stop(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    append_all(path, SaveStarted(step=1), SaveStarted(step=2))
    reading = follow(path, timeout_s=30.0, stop=lambda: True)
    assert [record.event for record in reading] == [SaveStarted(step=1), SaveStarted(step=2)]


def test_follow_ends_at_its_deadline_and_names_the_journal(tmp_path: Path) -> None:
    clock = ManualClock()
    append_all(tmp_path / "journal", SaveStarted(step=1))
    reading = follow(tmp_path / "journal", timeout_s=5.0, clock=clock)
    assert next(reading).event == SaveStarted(step=1)
    with pytest.raises(DeadlineError, match=r"waited 5\.0 s for the next event in .*journal"):
        next(reading)


def test_follow_goes_on_in_a_file_that_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    append_all(path, SaveStarted(step=1))
    reading = follow(path, timeout_s=30.0)
    assert next(reading).event == SaveStarted(step=1)
    append_all(tmp_path / "new", SaveStarted(step=2))
    (tmp_path / "new").rename(path)
    assert next(reading).event == SaveStarted(step=2)
    path.write_bytes(b"")
    append_all(path, Dropped(count=1))
    assert next(reading).event == Dropped(count=1)


@pytest.mark.parametrize("longer", [0, 1, 5000], ids=["as long", "longer", "much longer"])
def test_follow_notices_a_file_that_was_cut_and_grew_back(tmp_path: Path, longer: int) -> None:
    path = tmp_path / "journal"
    path.write_bytes(line({"kind": "SaveStarted", "step": 1}))
    reading = follow(path, timeout_s=30.0)
    assert next(reading).event == SaveStarted(step=1)
    path.write_bytes(b"")
    path.write_bytes(b"\n" * longer + line({"kind": "SaveStarted", "step": 2}))
    assert next(reading).event == SaveStarted(step=2)
    assert reading.damaged == 0


def test_append_is_fast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Journal(tmp_path / "journal") as writer:
        writer.append(SaveStarted(step=0))
        times = []
        for step in range(1, 5001):
            event = SaveCaptured(step=step, bytes=1 << 30, blocked_s=0.1)
            before = time.perf_counter()
            writer.append(event)
            times.append(1e6 * (time.perf_counter() - before))
    median, p99 = statistics.median(times), statistics.quantiles(times, n=100)[98]
    with capsys.disabled():
        print(f"\njournal.append: median {median:.1f} µs, p99 {p99:.1f} µs (bar: 20 µs)")
    assert median < 200.0  # ten times the bar: a shared machine is no stopwatch
