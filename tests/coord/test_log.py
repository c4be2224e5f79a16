"""The coordinator's log: what was synced is there after any crash, damage is named, the rest is cut."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.coord.ledger import replay
from holdfast.coord.log import Log
from holdfast.coord.records import Came, KeySet, KeysGone, Record, Started
from holdfast.coord.segment import BATCH_HEAD, SEGMENT_HEAD
from holdfast.errors import CorruptError, LeaseError, StorageError, VersionError
from holdfast.testing import MOUNT, DiskModel, Image, MemoryFiles, RecordingFiles
from holdfast.testing.faulty import FailingFiles, ForgetfulFiles

FOLDER = f"{MOUNT}/coord"


def some_records() -> Iterator[Record]:
    """A log that makes sense, without end."""
    yield Started(1, "service")
    yield Came(1, "inc-1", "one")
    for number in itertools.count():
        owner = 1 if number % 5 == 0 else 0
        yield KeySet(f"key-{number % 7}", b"v" * (number % 40), owner, "put", ((1, number + 1, number),))
        if number % 11 == 10:
            yield KeysGone((f"key-{number % 7}",), ())


RECORDS = list(itertools.islice(some_records(), 4000))
STATES = {0: replay([]).snapshot()}


def state_after(number: int) -> bytes:
    if number not in STATES:
        STATES[number] = replay(RECORDS[:number]).snapshot()
    return STATES[number]


def filled(folder: Path, sizes: list[int], *, sync_at: int | None = None) -> Log:
    """A log with batches of these sizes; synced after batch number `sync_at`."""
    log = Log(folder)
    log.recover()
    for at, size in enumerate(sizes):
        log.append(RECORDS[log.number : log.number + size])
        if at == sync_at:
            log.sync()
    return log


def abandon(log: Log) -> None:
    """What SIGKILL does: everything is let go, nothing is written."""
    for segment in (*log._full, log._segment):
        if segment is not None:
            log._files.close(segment.fd)
    log._files.close(log._lock_fd)


def check(folder: Path | str, number: int) -> Log:
    log = Log(folder)
    ledger = log.recover()
    assert (ledger.number, log.number) == (number, number)
    assert ledger.snapshot() == state_after(number)
    return log


def segment_file(folder: Path) -> Path:
    (path,) = folder.glob("log-*")
    return path


def test_what_was_appended_is_there_again(tmp_path: Path) -> None:
    abandon(filled(tmp_path, [1, 3, 10]))
    log = check(tmp_path, 14)
    assert log.synced == 14, "it is about to be seen by others"
    log.append(RECORDS[14:20])
    log.close()
    log = check(tmp_path, 20)
    assert log.cuts == []
    log.close()


def test_an_append_is_one_write(tmp_path: Path) -> None:
    files = RecordingFiles(tmp_path)
    log = Log(tmp_path, files=files)
    log.recover()
    files.log.clear()
    log.append(RECORDS[:100])
    assert [op.kind for op in files.log] == ["write"]
    log.sync()
    assert [op.kind for op in files.log] == ["write", "sync"]
    log.close()


@pytest.mark.parametrize("mode", ["cut", "zeros"])
def test_a_torn_tail_is_cut_off_at_every_byte(tmp_path: Path, mode: str) -> None:
    abandon(filled(tmp_path, [2, 3, 4], sync_at=0))
    path = segment_file(tmp_path)
    whole = path.read_bytes()
    ends = {}
    log = filled(tmp_path / "again", [2])
    ends[2] = log._segment_of().size
    log.append(RECORDS[2:5])
    ends[5] = log._segment_of().size
    log.close()
    for size in range(ends[2], len(whole)):
        torn = whole[:size] if mode == "cut" else whole[:size] + bytes(len(whole) - size)
        path.write_bytes(torn)
        number = 5 if size >= ends[5] else 2
        log = check(tmp_path, number)
        expected = [] if len(torn) == ends[number] else [f"{len(torn) - ends[number]:,} bytes from offset"]
        assert [cut[: len(want)] for cut, want in zip(log.cuts, expected, strict=True)] == expected
        log.append(RECORDS[number:8])
        abandon(log)
        abandon(check(tmp_path, 8))
        path.unlink()


def test_damage_before_what_proves_a_sync_is_an_error_at_every_byte(tmp_path: Path) -> None:
    """The batches say in passing how far the log was on the disk; so a hole before that is no torn tail."""
    log = filled(tmp_path, [2, 3], sync_at=1)
    log.append(RECORDS[5:7])
    abandon(log)
    path = segment_file(tmp_path)
    whole = path.read_bytes()
    begin = SEGMENT_HEAD
    end = len(whole) - len(_last_batch(whole))
    for at in range(begin, end):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(
            CorruptError, match=r"log-0+1 at offset \d+: record \d+ was on the disk"
        ) as caught:
            Log(tmp_path).recover()
        assert caught.value.file == path.name
        assert caught.value.block is not None
        assert caught.value.block <= at
        assert caught.value.hint


def _last_batch(whole: bytes) -> bytes:
    return whole[whole.rindex(b"\xb5hfb") :]


def test_damage_to_the_last_batch_is_found_after_a_clean_stop(tmp_path: Path) -> None:
    filled(tmp_path, [2, 3]).close()
    path = segment_file(tmp_path)
    whole = bytearray(path.read_bytes())
    whole[-BATCH_HEAD - 5] ^= 1
    path.write_bytes(whole)
    with pytest.raises(CorruptError, match="record 3 was on the disk"):
        Log(tmp_path).recover()


def test_damage_to_the_head_of_a_segment(tmp_path: Path) -> None:
    log = filled(tmp_path, [2], sync_at=0)
    log.append(RECORDS[2:4])
    log.snapshot(replay(RECORDS[:4]))
    log.append(RECORDS[4:6])
    log.close()
    path = segment_file(tmp_path)
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=r"log-0+5 at offset 0: record 5 was on the disk"):
        Log(tmp_path).recover()


def test_damage_to_the_head_of_the_first_segment(tmp_path: Path) -> None:
    filled(tmp_path, [2]).close()
    path = segment_file(tmp_path)
    data = bytearray(path.read_bytes())
    for at in range(SEGMENT_HEAD):
        bent = bytearray(data)
        bent[at] ^= 1
        path.write_bytes(bent)
        with pytest.raises(CorruptError, match="the head is damaged"):
            Log(tmp_path).recover()


def test_a_missing_start_is_an_error(tmp_path: Path) -> None:
    log = filled(tmp_path, [5])
    log.snapshot(replay(RECORDS[:5]))
    log.append(RECORDS[5:6])
    log.close()
    next(tmp_path.glob("snapshot-*")).unlink()
    with pytest.raises(CorruptError, match="the records before 6 are missing"):
        Log(tmp_path).recover()


def test_a_damaged_snapshot_is_an_error_or_made_up_for(tmp_path: Path) -> None:
    log = filled(tmp_path, [5])
    taken = log.start_snapshot(replay(RECORDS[:5]))
    log.append(RECORDS[5:6])
    kept = {path.name: path.read_bytes() for path in tmp_path.glob("log-*")}
    log.finish_snapshot(taken)
    log.close()
    (snapshot,) = tmp_path.glob("snapshot-*")
    snapshot.write_bytes(snapshot.read_bytes()[:-1])
    with pytest.raises(CorruptError, match="the snapshot is damaged"):
        Log(tmp_path).recover()
    for name, data in kept.items():
        (tmp_path / name).write_bytes(data)
    log = check(tmp_path, 6)
    assert "an older snapshot and the log made up for it" in log.cuts[0]
    log.close()


def test_a_snapshot_replaces_what_led_to_it(tmp_path: Path) -> None:
    log = Log(tmp_path, snapshot_records=10, snapshot_bytes=1 << 20)
    ledger = log.recover()
    for number in range(1000):
        log.append(RECORDS[number : number + 1])
        ledger.apply(RECORDS[number])
        if log.due():
            log.snapshot(ledger)
            assert not log.due()
            log.snapshot(ledger)  # twice, without a record in between
        if number % 7 == 0:
            log.sync()
        assert len(list(tmp_path.iterdir())) <= 3
    abandon(log)
    log = check(tmp_path, 1000)
    log.close()


def test_many_bytes_make_a_snapshot_due(tmp_path: Path) -> None:
    log = Log(tmp_path, snapshot_bytes=1000)
    log.recover()
    assert not log.due()
    log.append([Started(1, "x" * 1000)])
    assert log.due()
    log.close()


def test_a_record_of_the_future_is_not_mistaken_for_damage(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.recover()
    log.append([Unheard(1)])
    log.close()
    with pytest.raises(VersionError, match="record 1 is of no known kind"):
        Log(tmp_path).recover()


def test_a_record_that_does_not_fit_is_named(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.recover()
    log.append([Started(1, "s"), KeySet("k", b"", 77, "put", ())])
    log.close()
    with pytest.raises(CorruptError, match="record 2 does not fit what came before"):
        Log(tmp_path).recover()


def test_two_coordinators_never_serve_one_folder(tmp_path: Path) -> None:
    log = Log(tmp_path)
    with pytest.raises(LeaseError, match=r"is served by process \d+ on"):
        Log(tmp_path)
    let_go = threading.Timer(0.05, log.close)
    let_go.start()
    Log(tmp_path, wait_s=10.0).close()
    let_go.join()


def test_a_value_that_looks_like_a_log_is_none(tmp_path: Path) -> None:
    """A client stores the bytes of the log as a value, and then the power goes."""
    log = filled(tmp_path, [2, 2], sync_at=1)
    log.append(RECORDS[4:5])
    whole = segment_file(tmp_path).read_bytes()
    log.append([KeySet("evil", whole[SEGMENT_HEAD:] * 2, 0, "put", ())])
    abandon(log)
    other = tmp_path / "other"
    filled(other, [1]).close()
    path = segment_file(other)
    path.write_bytes(path.read_bytes() + b"\xb5hfb torn" + whole[SEGMENT_HEAD:])
    log = check(other, 1)
    assert len(log.cuts) == 1
    log.close()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_bytes_are_a_state_or_a_named_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("log")
    abandon(filled(folder, data.draw(st.lists(st.integers(1, 5), max_size=6)), sync_at=2))
    path = segment_file(folder)
    bent = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(bent)))
        bent[at : at + data.draw(st.integers(0, 20))] = data.draw(st.binary(max_size=30))
    path.write_bytes(bent)
    try:
        log = Log(folder)
        ledger = log.recover()
    except CorruptError:
        return
    assert ledger.snapshot() == state_after(ledger.number)
    log.close()


# ---- power cuts


def scenario(files: RecordingFiles, seed: int, steps: int) -> None:
    """A coordinator's life on a disk: batches, syncs, snapshots, restarts; marks say what was promised."""
    rng = random.Random(seed)
    log = Log(FOLDER, files=files, salt=seed)
    ledger = log.recover()
    for _ in range(steps):
        match rng.choice(["append"] * 6 + ["sync"] * 3 + ["snapshot", "half", "restart"]):
            case "append":
                batch = RECORDS[log.number : log.number + rng.randint(1, 12)]
                for record in batch:
                    ledger.apply(record)
                log.append(batch)
            case "sync":
                files.mark("synced", log.sync())
                if rng.random() < 0.3:
                    log.append([])
            case "snapshot":
                log.snapshot(ledger)
                files.mark("synced", ledger.number)
            case "half":
                taken = log.start_snapshot(ledger)
                batch = RECORDS[log.number : log.number + 3]
                for record in batch:
                    ledger.apply(record)
                log.append(batch)
                if rng.random() < 0.5:
                    files.mark("synced", log.sync())
                log.finish_snapshot(taken)
                files.mark("synced", taken.number)
            case _:
                abandon(log)
                log = Log(FOLDER, files=files, salt=seed)
                ledger = log.recover()
                files.mark("synced", ledger.number)


def memory_log(image: Image) -> tuple[Log, MemoryFiles]:
    files = MemoryFiles(image, writable=True)
    return Log(FOLDER, files=files, salt=99), files


def crash_problem(image: Image, synced: int, newest: int) -> str:
    """What is wrong with a recovery from this disk; empty if nothing is."""
    try:
        log, files = memory_log(image)
        ledger = log.recover()
    except CorruptError as error:
        return f"corrupt: {error}"
    if not synced <= ledger.number <= newest:
        return f"record {ledger.number} is the last, between {synced} and {newest} are possible"
    if ledger.snapshot() != state_after(ledger.number):
        return f"another state than that after record {ledger.number}"
    # And on it goes.
    log.append(RECORDS[ledger.number : ledger.number + 2])
    log.close()
    again, _ = memory_log(files.image())
    if again.recover().snapshot() != state_after(ledger.number + 2):
        return "what was appended after the recovery is not there"
    return ""


def crashes(files: RecordingFiles, limit: int, seed: int = 0) -> tuple[int, list[str]]:
    model = DiskModel(files.log)
    synced = num_states = 0
    problems: list[str] = []
    newest = max((op.note[1] for op in files.log if op.note), default=0) + 100
    for point in range(len(files.log) + 1):
        if point and (note := files.log[point - 1].note) is not None:
            synced = note[1]
        model.seek(point)
        for state in model.states(limit, seed=seed):
            num_states += 1
            problem = crash_problem(state, synced, newest)
            if problem:
                problems.append(f"after {point} operations ({files.log[point - 1]}): {problem}")
                if len(problems) > 3:
                    return num_states, problems
    return num_states, problems


def recorded(seed: int, steps: int, forget: Callable[[str, str], bool] | None = None) -> RecordingFiles:
    inner = MemoryFiles(Image.empty(), writable=True)
    if forget is None:
        files = RecordingFiles(MOUNT, inner=inner)
    else:
        files = ForgetfulFiles(MOUNT, forget)
        files._inner = inner
    scenario(files, seed, steps)
    return files


@pytest.mark.parametrize("seed", range(4))
def test_no_power_cut_loses_what_was_synced(seed: int) -> None:
    num_states, problems = crashes(recorded(seed, 25), limit=12)
    assert not problems, "\n".join(problems)
    assert num_states > 100


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(100, 130))
def test_no_power_cut_of_many_loses_what_was_synced(seed: int) -> None:
    num_states, problems = crashes(recorded(seed, 60), limit=60, seed=seed)
    assert not problems, "\n".join(problems)
    assert num_states > 1000


@pytest.mark.parametrize(
    "which",
    [
        pytest.param(lambda kind, path: kind == "sync" and "log-" in path, id="records"),
        pytest.param(lambda kind, path: kind == "sync" and "snapshot" in path, id="snapshot"),
        pytest.param(lambda kind, path: kind == "sync_folder" and path.endswith("coord"), id="folder"),
    ],
)
def test_a_missing_sync_would_be_found(which: Callable[[str, str], bool]) -> None:
    assert any(crashes(recorded(seed, 25, forget=which), limit=12)[1] for seed in range(4))


def test_a_crash_during_the_recovery_from_a_crash() -> None:
    files = recorded(7, 20)
    model = DiskModel(files.log)
    synced = 0
    for point in range(0, len(files.log), 3):
        synced = max([synced, *(op.note[1] for op in files.log[:point] if op.note)])
        model.seek(point)
        for number, state in enumerate(model.states(3, seed=1)):
            second = RecordingFiles(MOUNT, inner=MemoryFiles(state, writable=True), image=state)
            log = Log(FOLDER, files=second, salt=5)
            found = log.recover().number
            second.mark("synced", found)
            log.append(RECORDS[found : found + 2])
            inner = DiskModel(second.log, image=state)
            for again in range(len(second.log) + 1):
                inner.seek(again)
                promised = found if any(op.note for op in second.log[:again]) else synced
                for image in inner.states(3, seed=number):
                    problem = crash_problem(image, promised, found + 100)
                    assert not problem, f"{point}, {number}, {again}: {problem}"


def test_a_full_disk_ends_the_log_and_loses_nothing(tmp_path: Path) -> None:
    files = FailingFiles(tmp_path)
    log = Log(tmp_path, files=files)
    ledger = log.recover()
    log.append(RECORDS[:3])
    for record in RECORDS[:3]:
        ledger.apply(record)
    files.arm(0, 28, lasting=True)
    with pytest.raises(StorageError, match="cannot write"):
        log.append(RECORDS[3:5])
    files.disarm()
    files.arm(1)
    with pytest.raises(StorageError):
        log.snapshot(ledger)
    files.disarm()
    abandon(log)
    check(tmp_path, 3).close()


class Unheard(Started, frozen=True, array_like=True, tag=99):
    """A record that this version does not know."""

    term: int
    service: str = ""
