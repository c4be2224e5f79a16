"""What a crash may leave of a disk, given the operations that were asked of it.

The model is that of ALICE (Pillai et al., OSDI 2014) at its weakest that checkpoints may rely on:

- bytes: after the last completed fsync of an inode, every 512-byte sector or 4 KiB page holds any version
  that was ever written to it since, independently of the others; space that was reserved and not written
  reads as zeros; the size is any that the file has had since;
- names: an operation on a folder that was not synced since may be lost while a later one is kept, except
  that operations on the same name keep their order; a rename happens whole or not at all;
- a sync of a file makes its bytes certain, not its name; a sync of a folder makes its names certain.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Final, final

from holdfast.testing.memory_disk import ROOT, Image
from holdfast.testing.recording import Op

SECTOR: Final = 512
PAGE: Final = 4096
_NAMING: Final = ("create", "mkdir", "link", "rename", "unlink", "rmdir")
_MOST_MASKS: Final = 10


@final
class _Naming:
    """An operation on names: the entries it sets (to an inode) or clears (None), all or none of them."""

    __slots__ = ("effects", "entries", "folders")

    def __init__(self, op: Op) -> None:
        here, there = (op.folder, op.name), (op.to_folder, op.to_name)
        effects: dict[tuple[int, str], int | None]
        if op.kind in ("create", "mkdir"):
            effects = {here: op.ino}
        elif op.kind == "link":
            effects = {there: op.ino}
        elif op.kind == "rename":
            effects = {here: None, there: op.ino}
        else:
            effects = {here: None}
        self.effects = effects
        self.entries = frozenset(effects)
        self.folders = frozenset(folder for folder, _ in effects)

    def apply(self, folders: dict[int, dict[str, int]]) -> None:
        for (folder, name), ino in self.effects.items():
            if ino is None:
                folders[folder].pop(name, None)
            else:
                folders[folder][name] = ino


@final
class _Versions:
    """Everything that the bytes of one file may be."""

    def __init__(self, durable: bytes, pending: Sequence[Op]) -> None:
        sizes = [len(durable)]
        for op in pending:
            if op.kind == "truncate":
                sizes.append(op.size)
            elif op.kind == "allocate":
                sizes.append(max(sizes[-1], op.size))
            else:
                sizes.append(max(sizes[-1], op.offset + len(op.data)))
        self.sizes = list(dict.fromkeys(sizes))
        self.newest_size = sizes[-1]
        self._blocks = {unit: _blocks(durable, pending, max(sizes), unit) for unit in (SECTOR, PAGE)}

    def count(self, unit: int) -> int:
        """How many there are, torn at multiples of `unit`."""
        return len(self.sizes) * math.prod(len(block) for block in self._blocks[unit])

    def every(self, unit: int) -> Iterator[bytes]:
        """All of them, torn at multiples of `unit`."""
        for blocks in itertools.product(*self._blocks[unit]):
            whole = b"".join(blocks)
            for size in self.sizes:
                yield whole[:size].ljust(size, b"\0")

    def oldest(self) -> bytes:
        return self._assemble(PAGE, lambda block, at: block[0], self.sizes[0])

    def newest(self) -> bytes:
        return self._assemble(PAGE, lambda block, at: block[-1], self.newest_size)

    def sample(self, rng: random.Random) -> bytes:
        """One of them; torn in one of the ways that disks and page caches tear."""
        style = rng.randrange(6)
        if style == 0:
            return self.newest() if rng.random() < 0.7 else self.oldest()
        unit = rng.choice((SECTOR, PAGE))
        number = len(self._blocks[unit])
        at = rng.randrange(number) if number else 0
        size = self.newest_size if rng.random() < 0.8 else rng.choice(self.sizes)
        if style == 1:  # all but one block
            return self._assemble(unit, lambda block, i: block[0 if i == at else -1], size)
        if style == 2:  # a prefix
            return self._assemble(unit, lambda block, i: block[-1 if i < at else 0], size)
        if style == 3:  # a suffix
            return self._assemble(unit, lambda block, i: block[-1 if i >= at else 0], size)
        return self._assemble(unit, lambda block, i: rng.choice(block), size)

    def _assemble(self, unit: int, pick: Callable[[list[bytes], int], bytes], size: int) -> bytes:
        whole = b"".join([pick(block, at) for at, block in enumerate(self._blocks[unit])])
        return whole[:size].ljust(size, b"\0")


def _blocks(durable: bytes, pending: Sequence[Op], size: int, unit: int) -> list[list[bytes]]:
    """The versions of every block, oldest first, none twice in a row."""
    now = bytearray(durable.ljust(size, b"\0"))
    blocks = [[bytes(now[at : at + unit])] for at in range(0, size, unit)]
    for op in pending:
        if op.kind == "truncate":
            begin, end = op.size, size
            now[begin:end] = bytes(end - begin)
        elif op.kind == "write":
            begin, end = op.offset, op.offset + len(op.data)
            now[begin:end] = op.data
        else:
            continue
        for number in range(begin // unit, -(-end // unit)):
            version = bytes(now[number * unit : (number + 1) * unit])
            if version != blocks[number][-1]:
                blocks[number].append(version)
    return blocks


@final
class DiskModel:
    """A disk that has been asked for the first `point` operations of a log."""

    def __init__(self, log: Sequence[Op], *, image: Image | None = None) -> None:
        self.log = log
        self._start = image or Image.empty()
        self._reset()

    def _reset(self) -> None:
        self.point = 0
        self._folders = {ino: dict(names) for ino, names in self._start.folders.items()}
        self._durable = dict(self._start.files)
        self._pending: dict[int, list[Op]] = {}
        self._versions: dict[int, _Versions] = {}
        self._naming: list[_Naming] = []

    def seek(self, point: int) -> None:
        """Be the disk after the first `point` operations."""
        if point < self.point:
            self._reset()
        for op in self.log[self.point : point]:
            self._step(op)
        self.point = point

    def _step(self, op: Op) -> None:
        if op.kind in _NAMING:
            if op.kind == "create":
                self._durable[op.ino] = b""
            elif op.kind == "mkdir":
                self._folders[op.ino] = {}
            self._naming.append(_Naming(op))
        elif op.kind == "sync_folder":
            self._settle_names(op.ino)
        elif op.kind == "sync":
            if self._pending.pop(op.ino, None):
                self._durable[op.ino] = self._versions.pop(op.ino).newest()
        elif op.kind != "mark":
            pending = self._pending.setdefault(op.ino, [])
            pending.append(op)
            self._versions[op.ino] = _Versions(self._durable[op.ino], pending)

    def _settle_names(self, folder: int) -> None:
        certain: set[int] = set()
        entries: set[tuple[int, str]] = set()
        # Backwards, so that what an operation builds upon becomes certain with it.
        for number in range(len(self._naming) - 1, -1, -1):
            naming = self._naming[number]
            if folder in naming.folders or naming.entries & entries:
                certain.add(number)
                entries |= naming.entries
        for number in sorted(certain):
            self._naming[number].apply(self._folders)
        reachable = self._reachable(self._folders)
        hoped = {ino for n in self._naming for ino in n.effects.values() if ino is not None}
        self._naming = [
            naming
            for number, naming in enumerate(self._naming)
            # What happens in a folder that is gone for good can no longer be told apart.
            if number not in certain and (naming.folders & (reachable | hoped))
        ]

    @staticmethod
    def _reachable(folders: dict[int, dict[str, int]]) -> set[int]:
        found: set[int] = set()
        waiting = [ROOT]
        while waiting:
            ino = waiting.pop()
            if ino not in found:
                found.add(ino)
                waiting.extend(folders.get(ino, {}).values())
        return found

    # ---- states

    def settled(self) -> Image:
        """The disk if everything asked of it had reached it: what a reader sees without a crash."""
        folders = self._named(range(len(self._naming)))
        return self._image(folders, {ino: v.newest() for ino, v in self._versions.items()})

    def states(self, limit: int, seed: int) -> Iterator[Image]:
        """States that a crash now may leave: all of them if there are at most `limit`, else a sample.

        The sample holds all that are torn at pages only, if those are at most `limit`.

        The same log, point, limit and seed give the same states in the same order.
        """
        subsets = self._subsets()
        left = limit
        for unit in (SECTOR, PAGE):
            total = math.prod(version.count(unit) for version in self._versions.values())
            if subsets is not None and len(subsets) * total <= limit:
                yield from self._every(subsets, unit)
                left -= len(subsets) * total
                if unit == SECTOR:
                    return
        yield from itertools.islice(self._sampled(subsets, random.Random(f"{seed}/{self.point}")), left)

    def _every(self, subsets: Sequence[tuple[int, ...]], unit: int) -> Iterator[Image]:
        inodes = list(self._versions)
        for data in itertools.product(*(list(self._versions[ino].every(unit)) for ino in inodes)):
            chosen = dict(zip(inodes, data, strict=True))
            for subset in subsets:
                yield self._image(self._named(subset), chosen)

    def _sampled(self, subsets: Sequence[tuple[int, ...]] | None, rng: random.Random) -> Iterator[Image]:
        everything = tuple(range(len(self._naming)))
        for subset in ((), everything):
            for newest in (False, True):
                chosen = {i: v.newest() if newest else v.oldest() for i, v in self._versions.items()}
                yield self._image(self._named(subset), chosen)
        while True:
            if rng.random() < 0.4:
                subset = everything
            else:
                subset = rng.choice(subsets) if subsets is not None else self._some(rng)
            chosen = {ino: versions.sample(rng) for ino, versions in self._versions.items()}
            yield self._image(self._named(subset), chosen)

    def _needs(self) -> list[set[int]]:
        """For every uncertain naming, the earlier ones on the same names."""
        return [
            {before for before in range(number) if self._naming[before].entries & naming.entries}
            for number, naming in enumerate(self._naming)
        ]

    def _subsets(self) -> list[tuple[int, ...]] | None:
        """Every set of namings that may have reached the disk; None if there are too many."""
        if len(self._naming) > _MOST_MASKS:
            return None
        needs = self._needs()
        found = []
        for kept in itertools.product((False, True), repeat=len(self._naming)):
            subset = {number for number, keep in enumerate(kept) if keep}
            if all(needs[number] <= subset for number in subset):
                found.append(tuple(sorted(subset)))
        return found

    def _some(self, rng: random.Random) -> tuple[int, ...]:
        needs = self._needs()
        likely = rng.choice((0.2, 0.5, 0.8, 0.95))
        kept: set[int] = set()
        for number, need in enumerate(needs):
            if need <= kept and rng.random() < likely:
                kept.add(number)
        return tuple(sorted(kept))

    def _named(self, subset: Sequence[int] | range) -> dict[int, dict[str, int]]:
        folders = dict(self._folders)
        touched: set[int] = set()
        for number in subset:
            for folder in self._naming[number].folders - touched:
                folders[folder] = dict(folders[folder])
                touched.add(folder)
            self._naming[number].apply(folders)
        return folders

    def _image(self, folders: dict[int, dict[str, int]], chosen: dict[int, bytes]) -> Image:
        """Only what can be reached, so that equal states are equal images."""
        reachable = self._reachable(folders)
        return Image(
            {ino: folders[ino] for ino in sorted(reachable) if ino in folders},
            {
                ino: chosen[ino] if ino in chosen else self._durable[ino]
                for ino in sorted(reachable)
                if ino not in folders
            },
        )
