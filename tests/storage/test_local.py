"""LocalStore: atomic small files, names that cannot escape, links that are not followed, locks."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from contextlib import closing
from pathlib import Path
from typing import final

import pytest

from holdfast.errors import MissingPathError, OutOfSpaceError, StorageError, UsageError
from holdfast.storage import ALIGN, TEMPORARY, Files, LocalStore
from holdfast.storage.local import _LocalHold
from tests.checkpoint.children import Children


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    made = LocalStore(tmp_path / "a" / "b" / "root")
    made.make_root()
    return made


def listing(store: LocalStore) -> list[str]:
    return [
        os.path.relpath(os.path.join(path, name), store.root)
        for path, _, names in os.walk(store.root)
        for name in names
    ]


def test_root_is_made_with_its_parents(store: LocalStore) -> None:
    store.make_root()
    assert os.path.isdir(store.root)
    assert store.names() == []


def test_create_is_create_if_absent(store: LocalStore) -> None:
    assert store.create("x", data=b"one")
    assert not store.create("x", data=b"two")
    assert store.read("x", max_bytes=10) == b"one"
    assert listing(store) == ["x"]


def test_only_one_of_many_creators_wins(store: LocalStore) -> None:
    won: list[int] = []
    barrier = threading.Barrier(8)

    def create(number: int) -> None:
        barrier.wait(30.0)
        if store.create("x", data=str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=create, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert len(won) == 1
    assert store.read("x", max_bytes=10) == str(won[0]).encode()
    assert listing(store) == ["x"]


def test_replace(store: LocalStore) -> None:
    store.replace("x", data=b"one")
    store.replace("x", data=b"three")
    assert store.read("x", max_bytes=10) == b"three"
    assert listing(store) == ["x"]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/etc/passwd", "../x", "a\0b", "/"], ids=lambda name: repr(name)
)
def test_names_cannot_escape(name: str, store: LocalStore) -> None:
    for act in (
        lambda: store.path(name),
        lambda: store.create(name, data=b""),
        lambda: store.replace("folder", name, data=b""),
        lambda: store.read(name, max_bytes=1),
        lambda: store.remove(name),
        lambda: store.make_folder(name),
        lambda: store.remove_folder(name),
        lambda: store.write_part(name, size=1),
        lambda: store.open_part(name),
        lambda: store.exists(name),
        lambda: store.is_busy(name),
        lambda: store.move(("x",), (name,)),
    ):
        with pytest.raises(UsageError, match="not a legal name"):
            act()


def test_links_are_not_followed(store: LocalStore, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"do not touch")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_bytes(b"far")
    os.symlink(secret, store.path("link"))
    os.symlink(outside, store.path("folder"))
    assert not store.exists("link")
    assert store.size("link") is None
    assert store.names("folder") == []
    with pytest.raises(StorageError):
        store.read("link", max_bytes=100)
    with pytest.raises(StorageError):
        store.open_part("link")
    with pytest.raises(StorageError):
        store.write_part("link", size=10)
    with pytest.raises(StorageError, match="is not a folder"):
        store.make_folder("folder")
    assert not store.create("link", data=b"x")  # the name is taken, whatever it points to
    store.replace("link", data=b"new")
    assert store.read("link", max_bytes=100) == b"new"
    assert secret.read_bytes() == b"do not touch"
    assert store.remove("folder")  # the link, not what it points to
    assert (outside / "x").read_bytes() == b"far"


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    os.symlink(real, tmp_path / "link")
    store = LocalStore(tmp_path / "link")
    store.create("x", data=b"1")
    assert (real / "x").read_bytes() == b"1"


def test_reading_is_bounded_before_memory_is_taken(store: LocalStore) -> None:
    with open(store.path("huge"), "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(StorageError, match=r"1,099,511,627,776 bytes, more than the 1,000 allowed"):
        store.read("huge", max_bytes=1000)


def test_missing_things(store: LocalStore) -> None:
    with pytest.raises(MissingPathError) as caught:
        store.read("x", max_bytes=1)
    assert caught.value.path == store.path("x")
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(MissingPathError):
        store.open_part("x")
    assert not store.remove("x")
    assert not store.exists("x")
    assert store.names("nowhere") == []
    assert not store.is_busy("x")


@pytest.mark.parametrize("size", [0, 1, ALIGN - 1, ALIGN, ALIGN + 1, 3 * ALIGN + 17, 1 << 20])
def test_part_files(size: int, store: LocalStore) -> None:
    data = os.urandom(size)
    memory = mmap.mmap(-1, max(size, 1))  # aligned, as a slot is
    memory[:size] = data
    image = memoryview(memory)[:size]
    writer = store.write_part("part", size=size)
    for begin in range(0, size, 2 * ALIGN):
        writer.write(image[begin : begin + 2 * ALIGN], begin)
    writer.sync()
    writer.close()
    writer.close()
    assert (Path(store.root) / "part").read_bytes() == data
    for direct in (True, False):
        reader = store.open_part("part", direct=direct)
        assert reader.size == size
        assert reader.read(0, size + 5) == data
        assert reader.read(size // 2, 10) == data[size // 2 : size // 2 + 10]
        assert reader.read(size + 1, 10) == b""
        reader.close()
        reader.close()


def test_space_is_reserved_and_exact(store: LocalStore) -> None:
    writer = store.write_part("part", size=1 << 20)
    writer.close()
    found = os.stat(store.path("part"))
    assert found.st_size == 1 << 20
    assert found.st_blocks * 512 >= 1 << 20
    # A shorter file over a longer one: recycling must not leave the old tail.
    writer = store.write_part("part", size=5000)
    writer.close()
    assert os.stat(store.path("part")).st_size == 5000


def test_a_part_larger_than_the_disk_is_refused_before_damage(store: LocalStore) -> None:
    with pytest.raises(OutOfSpaceError, match="bytes needed"):
        store.write_part("part", size=1 << 60)
    assert not store.is_busy("part")


def test_recycled_file_becomes_the_part(store: LocalStore) -> None:
    store.write_part("old", size=1 << 20).close()
    inode = os.stat(store.path("old")).st_ino
    store.write_part("new", size=1 << 19, recycled=("old",)).close()
    assert not store.exists("old")
    assert os.stat(store.path("new")).st_ino == inode
    assert store.size("new") == 1 << 19


class Tidy(Files):
    """Somebody removes the folder of a file, while it is empty, right before the file is made."""

    def __init__(self, times: int) -> None:
        self.times = times

    def create(self, path: str, *, exclusive: bool = False) -> int:
        if self.times:
            self.times -= 1
            os.rmdir(os.path.dirname(path))
        return super().create(path, exclusive=exclusive)


def test_a_folder_that_is_cleaned_away_as_a_part_is_begun_is_made_again(store: LocalStore) -> None:
    other = LocalStore(store.root, files=Tidy(2))
    other.write_part("f", "part", size=10).close()
    assert store.size("f", "part") == 10
    with pytest.raises(MissingPathError):
        LocalStore(store.root, files=Tidy(100)).write_part("g", "part", size=10)


@final
class Crowded(Files):
    """A folder is removed right before a file is made in it, and another rank makes it right after."""

    def __init__(self) -> None:
        self.times = 2

    def create(self, path: str, *, exclusive: bool = False) -> int:
        folder, self.times = os.path.dirname(path), self.times - 1
        if self.times < 0:
            return super().create(path, exclusive=exclusive)
        os.rmdir(folder)
        try:
            return super().create(path, exclusive=exclusive)
        finally:
            os.mkdir(folder)


def test_a_folder_that_is_there_again_by_then_is_no_reason_to_fail(store: LocalStore) -> None:
    LocalStore(store.root, files=Crowded()).write_part("f", "part", size=10).close()
    assert store.size("f", "part") == 10


def test_a_recycled_file_that_is_gone_is_no_missing_folder(store: LocalStore) -> None:
    with pytest.raises(MissingPathError, match="old"):
        store.write_part("f", "new", size=10, recycled=("old",))


def test_locks(store: LocalStore) -> None:
    writer = store.write_part("part", size=10)
    assert store.is_busy("part")
    with pytest.raises(StorageError, match="is being written by another process"):
        store.write_part("part", size=10)
    writer.close()
    assert not store.is_busy("part")
    readers = [store.open_part("part"), store.open_part("part")]
    assert store.is_busy("part")  # not to be recycled under a reader
    for reader in readers:
        reader.close()
    assert not store.is_busy("part")


def test_a_lock_ends_with_its_writer_although_another_has_the_open_file(store: LocalStore) -> None:
    """As a child does that a library forked."""
    hold = store.hold("name", exclusive=True)
    writer = store.write_part("part", size=10)
    assert isinstance(hold, _LocalHold)
    twins = [os.dup(hold.fd), os.dup(writer._fd)]  # type: ignore[attr-defined]
    assert store.is_busy("name")
    hold.close()
    writer.close()
    assert not store.is_busy("name")
    assert not store.is_busy("part")
    for fd in twins:
        os.close(fd)


@pytest.mark.process
def test_locks_of_a_killed_process_do_not_live_on_in_its_forks(store: LocalStore, children: Children) -> None:
    code = (
        "import os, signal, sys; from holdfast.storage import LocalStore\n"
        "from tests.checkpoint.trainer import report\n"
        "store = LocalStore(sys.argv[1])\n"
        "writer, hold = store.write_part('part', size=10), store.hold('name', exclusive=True)\n"
        "if not (fork := os.fork()):\n"
        "    hold.close(); writer.write(memoryview(b'x' * 10), 0); writer.close()\n"
        "    report('forked'); signal.pause()\n"
        "sys.stdin.readline()"
    )
    child = children.python("-c", code, store.root)
    child.until("forked")
    # What the child does with its copies leaves those of the parent alone.
    assert store.is_written("part")
    assert store.is_written("name")
    assert store.read("part", max_bytes=10) == bytes(10)
    child.kill()
    child.end()
    assert len(children.alive()) == 1
    assert not store.is_busy("part")
    assert not store.is_busy("name")


def test_a_reader_that_comes_while_the_writer_commits_gets_its_lock_later(store: LocalStore) -> None:
    writer = store.write_part("part", size=2 * ALIGN)
    with closing(store.open_part("part")) as reader, closing(store.open_part("part")) as other:
        assert reader.read(0, 5) == bytes(5)
        writer.close()
        assert not store.is_busy("part")
        assert reader.read(ALIGN, 5) == bytes(5)
        assert store.is_busy("part")  # not to be recycled any more
        reader.close()
        # The other one did not read meanwhile, and the step is pruned.
        store.write_part("new", size=2 * ALIGN, recycled=("part",)).close()
        with pytest.raises(MissingPathError, match="was removed while it was read"):
            other.read_into(memoryview(mmap.mmap(-1, ALIGN)), 0)


@pytest.mark.process
def test_locks_end_with_their_process(store: LocalStore, children: Children) -> None:
    code = (
        "import sys; from holdfast.storage import LocalStore\n"
        "from tests.checkpoint.trainer import report\n"
        "writer = LocalStore(sys.argv[1]).write_part('part', size=10)\n"
        "report('locked'); sys.stdin.readline()"
    )
    child = children.python("-c", code, store.root)
    child.until("locked")
    assert store.is_busy("part")
    child.kill()
    child.end()
    assert not store.is_busy("part")


def test_a_failed_small_write_leaves_nothing(tmp_path: Path) -> None:
    class Full(Files):
        def sync(self, fd: int) -> None:
            raise OSError(errno.ENOSPC, "full")

    store = LocalStore(tmp_path / "root", files=Full())
    store.make_root()
    with pytest.raises(OutOfSpaceError) as caught:
        store.create("x", data=b"1")
    assert caught.value.hint
    assert listing(store) == []


def test_temporary_files_of_a_live_writer_are_seen_as_busy(store: LocalStore) -> None:
    fd = store.files.create(store.path(f"{TEMPORARY}1"), exclusive=True)
    assert store.files.lock(fd)
    assert store.is_busy(f"{TEMPORARY}1")
    store.files.close(fd)
    assert not store.is_busy(f"{TEMPORARY}1")


def test_direct_io_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that answers EINVAL to O_DIRECT is written and read through the cache."""
    real = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real(path, flags, mode)

    store = LocalStore(tmp_path / "root")
    store.make_root()
    monkeypatch.setattr(os, "open", refuse)
    data = os.urandom(3 * ALIGN + 5)
    writer = store.write_part("part", size=len(data))
    writer.write(memoryview(data), 0)
    writer.close()
    reader = store.open_part("part")
    assert reader.read(0, len(data)) == data
    buffer = bytearray(4 * ALIGN)
    assert reader.read_into(memoryview(buffer), 0) == len(data)
    reader.close()
