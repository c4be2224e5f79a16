"""Ways to damage a checkpoint, and a small real one to damage: two steps, two ranks, several blocks."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.checkpoint import Checkpointer
from holdfast.errors import HoldfastError
from holdfast.format import BLOCK, MANIFEST, MAX_MANIFEST, arrays_in, decode_index, read_manifest, step_folder
from holdfast.storage import LocalStore
from holdfast.testing import same

Tree = dict[str, Any]
OLD, NEW = 1, 2


def tree(step: int, *, large: bool = True, run: int = 0) -> Tree:
    """A state of several blocks per rank, no two steps or runs with a byte in common where it counts."""
    rng = np.random.default_rng([run, step])
    made: Tree = {"step": step, "small": {f"a{n}": rng.normal(size=(n, 3)) for n in range(1, 6)}}
    if large:
        made["left"] = rng.integers(1, 255, (10 << 20) + 17, np.uint8)
        made["right"] = rng.integers(1, 1 << 62, (9 << 17) + 5, np.int64)
    return made


def save(root: Path, step: int, **options: Any) -> None:
    """Save a step from two ranks."""
    ranks = [Checkpointer(root, writer="thread", rank=r, world=2, journal=False, keep=None) for r in range(2)]
    with ThreadPoolExecutor(2) as pool:
        handles = list(pool.map(lambda c: c.save(step, tree(step, **options)), ranks))
        for handle in handles:
            handle.durable(60.0)
        list(pool.map(Checkpointer.close, ranks))


@dataclass
class Good:
    """An undamaged folder with both steps, and one with another attempt at the newer step."""

    root: Path
    other: Path
    trees: dict[int, Tree] = field(default_factory=lambda: {OLD: tree(OLD, large=False), NEW: tree(NEW)})

    @staticmethod
    def make(place: Path) -> Good:
        good = Good(place / "good", place / "other")
        save(good.root, OLD, large=False)
        save(good.root, NEW)
        save(good.other, NEW, run=1)
        return good


@dataclass
class Victim:
    """A private copy of the good folder; files are shared with it until they are damaged."""

    root: Path
    good: Good
    rng: random.Random
    step: int = NEW
    # What the errors must name: a file, and for array data its block and one of its arrays.
    file: str = ""
    block: int | None = None
    array: str | None = None

    @staticmethod
    def make(root: Path, good: Good, rng: random.Random) -> Victim:
        shutil.copytree(good.root, root, copy_function=os.link)
        return Victim(root, good, rng)

    @property
    def folder(self) -> Path:
        return self.root / step_folder(NEW)

    def names(self, ending: str = "") -> list[str]:
        return sorted(name for name in os.listdir(self.folder) if name.endswith(ending))

    def pick(self, ending: str = "") -> Path:
        """One of the files, with bytes of its own; the errors must name it."""
        self.file = self.rng.choice(self.names(ending))
        return self.own(self.file)

    def own(self, name: str) -> Path:
        path = self.folder / name
        private = path.with_name("private")
        shutil.copyfile(path, private)
        os.replace(private, path)
        return path

    def expect(self, offset: int) -> None:
        """The damage is at `offset` of the file: say which block and array that is."""
        if not self.file.endswith(".safetensors"):
            return
        self.block = offset // BLOCK
        store = LocalStore(self.good.root)
        manifest = read_manifest(store, step_folder(NEW))
        part = int(self.file.split(".")[0].removeprefix("part-"))
        entry = next(p for p in manifest.parts if p.part == part)
        index = decode_index(store.read(step_folder(NEW), entry.index, max_bytes=1 << 20))
        here = arrays_in(index, 0, offset, offset + 1)
        self.array = here[0] if here else None


Damage = Callable[[Victim], None]


def patched(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flipped_bit(victim: Victim) -> None:
    path = victim.pick()
    size = path.stat().st_size
    # Half of them in the first bytes: headers and the small files would hardly be hit otherwise.
    at = victim.rng.randrange(size if victim.rng.random() < 0.5 else min(size, 8192))
    patched(path, at, bytes([path.read_bytes()[at] ^ 1 << victim.rng.randrange(8)]))
    victim.expect(at)


def flipped_last_byte(victim: Victim) -> None:
    path = victim.pick()
    at = path.stat().st_size - 1
    patched(path, at, bytes([path.read_bytes()[at] ^ 0x01]))
    victim.expect(at)


def zeroed_page(victim: Victim) -> None:
    path = victim.pick()
    at = victim.rng.randrange(-(-path.stat().st_size // 4096)) * 4096
    patched(path, at, bytes(min(4096, path.stat().st_size - at)))
    victim.expect(at)


def truncated(victim: Victim) -> None:
    path = victim.pick()
    size = path.stat().st_size
    os.truncate(path, victim.rng.choice((0, 1, size // 2, size - 1, victim.rng.randrange(size))))


def extended(victim: Victim) -> None:
    path = victim.pick()
    more = victim.rng.choice((b"\n", b"\0", b" ", b"}\n", victim.rng.randbytes(5000)))
    with path.open("ab") as file:
        file.write(more)


def deleted(victim: Victim) -> None:
    victim.pick().unlink()


def linked_away(victim: Victim) -> None:
    path = victim.pick()
    elsewhere = victim.root / "elsewhere"
    os.replace(path, elsewhere)
    path.symlink_to(elsewhere)


def folder_instead(victim: Victim) -> None:
    path = victim.pick()
    path.unlink()
    path.mkdir()


def swapped_between_ranks(victim: Victim) -> None:
    ending = victim.rng.choice((".safetensors", ".index.json"))
    one, two = (victim.folder / name for name in victim.names(ending))
    victim.file = one.name.partition(".")[0][:-1]  # both parts are wrong; a load meets one of them first
    kept = one.with_name("kept")
    os.replace(one, kept)
    os.replace(two, one)
    os.replace(kept, two)


def from_another_attempt(victim: Victim) -> None:
    victim.file = victim.rng.choice(victim.names())
    source = victim.good.other / step_folder(NEW)
    fitting = next(n for n in os.listdir(source) if _alike(n, victim.file))
    os.unlink(victim.folder / victim.file)
    shutil.copyfile(source / fitting, victim.folder / victim.file)
    if victim.file == MANIFEST:  # whole in itself; what it names is not there
        victim.file = ".index.json"


def from_another_step(victim: Victim) -> None:
    victim.file = victim.rng.choice(victim.names())
    source = victim.root / step_folder(OLD)
    fitting = next(n for n in os.listdir(source) if _alike(n, victim.file))
    os.unlink(victim.folder / victim.file)
    shutil.copyfile(source / fitting, victim.folder / victim.file)
    if victim.file == MANIFEST:
        victim.file = step_folder(NEW)


def _alike(one: str, two: str) -> bool:
    return (one.split(".")[0], one.split(".")[-1]) == (two.split(".")[0], two.split(".")[-1])


def edited_json(victim: Victim) -> None:
    """One value of the manifest or of an index is another, and the text is still legal JSON."""
    path = victim.pick(".json")
    value = json.loads(path.read_bytes())
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key, inner in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(inner, dict | list):
                walk(inner)
            else:
                places.append((node, key))

    walk(value)
    node, key = victim.rng.choice(places)
    old = node[key]
    node[key] = old + 1 if isinstance(old, int | float) else (f"{old}x" if isinstance(old, str) else "x")
    path.write_bytes(json.dumps(value, separators=(",", ":")).encode() + b"\n")


def oversized_header(victim: Victim) -> None:
    path = victim.pick(".safetensors")
    size = victim.rng.choice((1 << 63, 1 << 40, 100_000_001, path.stat().st_size, 0))
    patched(path, 0, size.to_bytes(8, "little"))
    victim.block = 0


def oversized_file(victim: Victim) -> None:
    path = victim.pick(".json")
    os.truncate(path, MAX_MANIFEST + 1)


def renamed_step(victim: Victim) -> None:
    victim.step = NEW + 1
    os.rename(victim.folder, victim.root / step_folder(victim.step))
    victim.file = step_folder(victim.step)


DAMAGES: tuple[Damage, ...] = (
    flipped_bit,
    flipped_last_byte,
    zeroed_page,
    truncated,
    extended,
    deleted,
    linked_away,
    folder_instead,
    swapped_between_ranks,
    from_another_attempt,
    from_another_step,
    edited_json,
    oversized_header,
    oversized_file,
    renamed_step,
)


def complaints(victim: Victim) -> list[str]:
    """Everything in which a damaged folder was not treated as it must be."""
    found: list[str] = []
    checkpointer = Checkpointer(victim.root, writer="thread", rank=0, world=1, journal=False)
    problems = checkpointer.verify(victim.step)
    if not problems:
        found.append("verify finds nothing")
    elif not any(victim.file in f"{p.file} {p.message}" for p in problems):
        found.append(f"verify does not name {victim.file}: {problems[0]}")
    elif victim.block is not None and not any(
        p.block == victim.block and (victim.array is None or victim.array in p.arrays) for p in problems
    ):
        found.append(f"verify does not name block {victim.block} and {victim.array}: {problems}")
    found += _load_complaints(checkpointer, victim)
    if not same(checkpointer.load(), victim.good.trees[OLD]):
        found.append("load() gives wrong values")
    repaired = Checkpointer(
        victim.root, writer="thread", rank=0, world=1, journal=False, copies=[victim.good.root]
    )
    try:
        if not same(repaired.load(), victim.good.trees[NEW]):
            step = repaired.last_load.step if repaired.last_load else None
            found.append(f"load() with a copy gives something else (step {step})")
    except HoldfastError as error:
        found.append(f"load() with a copy fails: {error.message}")
    return found


def _load_complaints(checkpointer: Checkpointer, victim: Victim) -> list[str]:
    try:
        loaded = checkpointer.load(step=victim.step)
    except HoldfastError as error:
        caught = error
    else:
        return [f"load({victim.step}) {'finds nothing' if same(loaded, tree(NEW)) else 'IS WRONG'}"]
    # A manifest that is not there, or is a link, means that the step does not exist.
    gone = victim.file == MANIFEST and f"no step {victim.step}" in str(caught)
    if victim.file not in str(caught) and not gone:
        return [f"load does not name {victim.file}: {caught.message}"]
    if victim.block is not None:
        block, arrays = getattr(caught, "block", None), getattr(caught, "arrays", ())
        if block != victim.block or (victim.array is not None and victim.array not in arrays):
            return [f"load does not name block {victim.block} and {victim.array}: {caught.message}"]
    return []
