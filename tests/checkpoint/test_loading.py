"""What `load` promises: any template, only the needed bytes, all mistakes at once, never wrong numbers."""

from __future__ import annotations

import collections
import dataclasses
import errno
import os
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from holdfast.arrays import protocols
from holdfast.arrays.dtypes import TABLE
from holdfast.checkpoint import Checkpointer
from holdfast.errors import CorruptError, MismatchError, NoCheckpointError, StorageError
from holdfast.format import BLOCK
from holdfast.journal import BlockBad, StepSkipped
from holdfast.storage import Files
from tests.checkpoint.children import Children
from tests.checkpoint.folder import damage, events, part_file

MIB = 1 << 20


def save(root: Path, tree: Any, step: int = 1, **settings: Any) -> None:
    with Checkpointer(root, writer="thread", keep=None, **settings) as ckpt:
        ckpt.save(step, tree).durable(60.0)


def random(shape: tuple[int, ...], kind: str | None = None, seed: int = 0) -> np.ndarray[Any, Any]:
    """Normal floats, or any bits of a dtype."""
    if kind is None:
        return np.random.default_rng(seed).standard_normal(shape, np.float32)
    numpy_dtype = TABLE[kind].numpy
    count = int(np.prod(shape)) * numpy_dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    if kind == "bool":
        raw &= 1
    return raw.view(numpy_dtype).reshape(shape)


def bits(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program that has imported no framework."""
    monkeypatch.setattr(protocols, "_FRAMEWORKS", {})


# ---- values


@pytest.mark.parametrize("kind", TABLE)
def test_every_dtype_comes_back_to_the_bit(kind: str, root: Path) -> None:
    tree = {
        "m": random((3, 5, 7), kind),
        "none": np.zeros((0, 3), TABLE[kind].numpy),
        "one": random((), kind),
        "long": random((2_000_003,), kind),
    }
    save(root, tree)
    ckpt = Checkpointer(root, journal=False)
    for found in (ckpt.load(), ckpt.load(into=tree)):
        for name, array in tree.items():
            assert found[name].dtype == array.dtype
            assert found[name].shape == array.shape
            assert bits(found[name]) == bits(array)


VIEWS: dict[str, Any] = {
    "transposed": lambda a: a.T,
    "every second row": lambda a: a[::2],
    "reversed": lambda a: a[:, ::-1],
    "fortran": lambda a: np.asfortranarray(a),
    "inner": lambda a: a[3:4, 5],
    "broadcast": lambda a: np.broadcast_to(a[0], a.shape),
    "overlapping": lambda a: np.lib.stride_tricks.sliding_window_view(a[0], 7),
}


@pytest.mark.parametrize("view", VIEWS)
def test_arrays_that_are_not_row_major(view: str, root: Path) -> None:
    array = VIEWS[view](random((60, 70)))
    save(root, {"x": array})
    found = Checkpointer(root, journal=False).load(into={"x": array})["x"]
    assert np.array_equal(found, array)
    assert found.flags.c_contiguous


def test_loaded_arrays_can_be_written(root: Path) -> None:
    tree = {"small": random((5,)), "middle": random((MIB,)), "large": random((10 * MIB,))}
    save(root, tree)
    ckpt = Checkpointer(root, journal=False)
    for found in (ckpt.load(), ckpt.load(into=tree)):
        for array in found.values():
            array[0] = 7.0  # its own memory, and nobody else's
        assert all(array[0] == 7.0 for array in found.values())
    assert all(np.array_equal(array, tree[name]) for name, array in ckpt.load().items())


def test_scalars_come_back_as_what_they_were(root: Path) -> None:
    tree = {"i": 2**70, "f": -0.0, "inf": float("inf"), "b": True, "s": "ü", "y": b"\0\1", "c": 1 + 2j}
    save(root, tree)
    found = Checkpointer(root, journal=False).load(into=tree)
    assert {name: (type(v), repr(v)) for name, v in found.items()} == {
        name: (type(v), repr(v)) for name, v in tree.items()
    }


def test_numpy_scalars_stay_numpy_scalars(root: Path) -> None:
    tree = {"a": np.float32(1.5), "b": ml_dtypes.bfloat16(2.0), "c": np.array(3)}
    save(root, tree)
    found = Checkpointer(root, journal=False).load(into=tree)
    assert [type(found[name]) for name in "abc"] == [np.float32, ml_dtypes.bfloat16, np.ndarray]


# ---- templates


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Model:
    w: Any
    name: str = dataclasses.field(default="m", metadata={"static": True})
    extra: Any = None


def test_containers_come_back_as_they_were(root: Path, bare: None) -> None:
    tree = {
        "model": Model(w=[random((3,)), random((4,), seed=1)], extra=Pair(1, random((2,)))),
        "ordered": collections.OrderedDict(z=random((1,)), a=random((2,))),
        "tuple": (random((2,)), None, ()),
        3: {"a/b~": random((1,))},
    }
    save(root, tree)
    ckpt = Checkpointer(root, journal=False)
    found = ckpt.load(into=tree)
    assert isinstance(found["model"], Model)
    assert isinstance(found["model"].extra, Pair)
    assert isinstance(found["ordered"], collections.OrderedDict)
    assert list(found["ordered"]) == ["z", "a"]
    assert found["tuple"][1:] == (None, ())
    assert np.array_equal(found["model"].w[1], tree["model"].w[1])  # type: ignore[attr-defined]
    assert np.array_equal(found[3]["a/b~"], tree[3]["a/b~"])  # type: ignore[index]
    names = ckpt.load()
    assert names["model"]["w"]["1"].shape == (4,)
    assert names["model"]["extra"]["left"] == 1
    assert names["3"]["a/b~"].shape == (1,)


def test_a_tree_that_is_one_leaf(root: Path) -> None:
    save(root, random((7,)))
    ckpt = Checkpointer(root, journal=False)
    assert np.array_equal(ckpt.load(), random((7,)))
    assert np.array_equal(ckpt.load(into=np.zeros(7, np.float32)), random((7,)))


def test_descriptions_are_templates(root: Path) -> None:
    class Shape:
        shape = (3, 4)
        dtype = np.dtype("float32")

    save(root, {"x": random((3, 4))})
    found = Checkpointer(root, journal=False).load(into={"x": Shape()})
    assert np.array_equal(found["x"], random((3, 4)))


# ---- mistakes


def test_all_mistakes_are_listed_at_once(root: Path) -> None:
    save(root, {"a": random((3,)), "b": random((4,)), "c": random((5,)), "d": 1, "e": random((2,)), "f": 2})
    template = {
        "a": np.zeros(4, np.float32),
        "b": np.zeros(4, np.float64),
        "d": np.zeros(1),
        "e": 5,
        "new": np.zeros(1),
    }
    ckpt = Checkpointer(root, journal=False)
    with pytest.raises(MismatchError) as caught:
        ckpt.load(into=template)
    assert sorted(caught.value.problems) == [
        "a: shape (4,) wanted, (3,) saved",
        "b: dtype float64 wanted, float32 saved (cast=True converts)",
        "c: in the checkpoint, not in the template",
        "d: the template has an array, the checkpoint a Python scalar",
        "e: the template has a Python scalar, the checkpoint an array",
        "f: in the checkpoint, not in the template",
        "new: not in the checkpoint",
    ]
    assert "strict=False" in (caught.value.hint or "")


def test_a_mismatch_does_not_fall_back_to_an_older_step(root: Path) -> None:
    save(root, {"a": random((3,))}, step=1)
    save(root, {"a": random((4,))}, step=2)
    with pytest.raises(MismatchError):
        Checkpointer(root, journal=False).load(into={"a": np.zeros(3, np.float32)})


def test_not_strict(root: Path) -> None:
    save(root, {"a": random((3,)), "extra": random((2,))})
    ckpt = Checkpointer(root, journal=False)
    template = {"a": np.zeros(3, np.float32), "new": np.ones(2), "n": 5}
    found = ckpt.load(into=template, strict=False)
    assert np.array_equal(found["a"], random((3,)))
    assert found["new"] is template["new"]
    assert found["n"] == 5
    with pytest.raises(MismatchError, match="shape"):  # a wrong shape is never ignored
        ckpt.load(into={"a": np.zeros(4, np.float32)}, strict=False)


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float64"), ("int32", "float32")],
)
def test_cast(saved: str, wanted: str, root: Path) -> None:
    values = np.arange(-4, 5).astype(TABLE[saved].numpy)
    save(root, {"x": values, "y": values})
    ckpt = Checkpointer(root, journal=False)
    template = {"x": np.zeros(9, TABLE[wanted].numpy), "y": values}
    with pytest.raises(MismatchError, match=rf"dtype {wanted} wanted, {saved} saved"):
        ckpt.load(into=template)
    found = ckpt.load(into=template, cast=True)
    assert found["x"].dtype == TABLE[wanted].numpy
    assert np.array_equal(found["x"].astype(float), values.astype(float))
    assert found["y"].dtype == values.dtype


def test_rename_by_mapping_and_function(root: Path) -> None:
    save(root, {"old": {"w": random((3,)), "b": random((2,))}})
    ckpt = Checkpointer(root, journal=False)
    template = {"new": {"w": np.zeros(3, np.float32), "b": np.zeros(2, np.float32)}}
    by_mapping = ckpt.load(into=template, rename={"new/w": "old/w", "new/b": "old/b"})
    by_function = ckpt.load(into=template, rename=lambda name: name.replace("new", "old"))
    for found in (by_mapping, by_function):
        assert np.array_equal(found["new"]["w"], random((3,)))
        assert np.array_equal(found["new"]["b"], random((2,)))
    with pytest.raises(MismatchError, match=r"old/x \(wanted as new/w\): not in the checkpoint"):
        ckpt.load(into=template, rename={"new/w": "old/x", "new/b": "old/b"})
    twice = ckpt.load(
        into={"p": np.zeros(3, np.float32), "q": np.zeros(3, np.float32)}, rename=lambda _: "old/w"
    )
    assert np.array_equal(twice["p"], twice["q"])
    assert not np.shares_memory(twice["p"], twice["q"])


# ---- only what is needed


def test_parts_read_only_their_blocks(root: Path) -> None:
    tree = {"params": {"w": random((4 * MIB,)), "b": random((3,))}, "opt": {"m": random((8 * MIB,))}}
    save(root, tree)
    ckpt = Checkpointer(root, journal=False)
    whole = ckpt.load()
    assert np.array_equal(whole["opt"]["m"], tree["opt"]["m"])
    assert ckpt.last_load is not None
    size = part_file(root, 1).stat().st_size
    assert ckpt.last_load.bytes_read == size
    template = {
        "params": {"w": np.zeros(4 * MIB, np.float32), "b": np.zeros(3, np.float32)},
        "opt": {"m": None},
    }
    for parts in ("params", ["params/*"], ["**/w", "**/b"]):
        found = ckpt.load(into=template, parts=parts)
        assert np.array_equal(found["params"]["w"], tree["params"]["w"])
        assert ckpt.last_load.nbytes == 16 * MIB + 12
        assert ckpt.last_load.bytes_read <= 16 * MIB + 2 * BLOCK
    only = ckpt.load(parts="params/b")
    assert list(only) == ["params"]
    assert np.array_equal(only["params"]["b"], tree["params"]["b"])
    assert ckpt.last_load.bytes_read <= BLOCK


def test_parts_keep_the_other_leaves(root: Path) -> None:
    save(root, {"a": random((3,)), "b": random((2,))})
    kept = np.full(2, 5.0)
    found = Checkpointer(root, journal=False).load(into={"a": np.zeros(3, np.float32), "b": kept}, parts="a")
    assert found["b"] is kept
    assert np.array_equal(found["a"], random((3,)))


class Watched(Files):
    """Remembers which files were opened."""

    def __init__(self) -> None:
        self.opened_files: list[str] = []

    def open_read(self, path: str) -> int:
        self.opened_files.append(os.path.basename(path))
        return super().open_read(path)

    def open_read_direct(self, path: str) -> int | None:
        self.opened_files.append(os.path.basename(path))
        return super().open_read_direct(path)


def test_metadata_touches_no_part(root: Path) -> None:
    save(root, {"a": random((MIB,))})
    files = Watched()
    ckpt = Checkpointer(root, files=files, journal=False)
    assert ckpt.metadata() == {}
    assert ckpt.info().num_arrays == 1
    assert ckpt.latest() == 1
    assert set(files.opened_files) == {"manifest.json"}


@pytest.mark.process
def test_memory_of_a_load_is_bounded(root: Path, children: Children) -> None:
    """The state, buffers of 64 MiB at most, and nothing else."""
    size = 400 * MIB
    save(root, {f"x{i}": np.full(size // 8, i, np.uint8) for i in range(8)})
    for into in ("None", "template"):
        child = children.python("-c", PEAK, root, into)
        line = child.until("loaded")
        assert child.end() == 0, child.errors()
        assert line["right"]
        assert line["grown"] < size + 64 * MIB + 24 * MIB, f"{line['grown'] / MIB:.0f} MiB"


PEAK = """
import resource, sys
import numpy as np
from holdfast.checkpoint import Checkpointer
from tests.checkpoint.trainer import report
class Shape:
    shape, dtype = (50 << 20,), np.dtype("uint8")
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
ckpt = Checkpointer(sys.argv[1], journal=False)
ckpt.load(parts="nothing")
before = peak()
tree = ckpt.load(into=None if sys.argv[2] == "None" else {f"x{i}": Shape() for i in range(8)})
grown = peak() - before
report("loaded", grown=grown, right=all((tree[f"x{i}"] == i).all() for i in range(8)))
"""


# ---- damage


def test_damage_falls_back_to_the_step_before(root: Path) -> None:
    save(root, {"a": random((5 * MIB,)), "b": random((10,))}, step=1)
    save(root, {"a": random((5 * MIB,), seed=1), "b": random((10,))}, step=2)
    damage(part_file(root, 2), BLOCK + 5)
    with Checkpointer(root) as ckpt:
        found = ckpt.load()
        assert np.array_equal(found["a"], random((5 * MIB,)))
        assert ckpt.last_load is not None
        assert ckpt.last_load.step == 1
        with pytest.raises(CorruptError) as caught:
            ckpt.load(step=2)
        assert (caught.value.block, caught.value.arrays) == (1, ("a",))
        assert (caught.value.file or "").startswith("part-00000.")
        (problem,) = ckpt.verify(2)
        assert (problem.block, problem.arrays) == (1, ("a",))
        # What does not touch the bad block can still be had.
        assert np.array_equal(ckpt.load(step=2, parts="b")["b"], random((10,)))
    bad = events(root, BlockBad)
    assert {(event.block, event.arrays) for event in bad} == {(1, ("a",))}
    assert [event.step for event in events(root, StepSkipped)] == [2]


@pytest.mark.parametrize("what", ["part", "missing part", "short part", "index", "manifest"])
def test_damage_is_read_from_a_copy(what: str, root: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    save(root, {"a": random((5 * MIB,))}, step=1)
    save(root, {"a": random((5 * MIB,), seed=1)}, step=2)
    shutil.copytree(root, copy)
    part = part_file(root, 2)
    match what:
        case "part":
            damage(part, BLOCK + 5)
        case "missing part":
            part.unlink()
        case "short part":
            part.write_bytes(part.read_bytes()[:-100])
        case "index":
            damage(next(part.parent.glob("*.index.json")), 50)
        case _:
            damage(part.parent / "manifest.json", 50)
    with Checkpointer(root, copies=[copy]) as ckpt:
        found = ckpt.load()
        assert ckpt.last_load is not None
        assert ckpt.last_load.step == 2
    assert np.array_equal(found["a"], random((5 * MIB,), seed=1))


def test_a_copy_of_another_save_is_not_mixed_in(root: Path, tmp_path: Path) -> None:
    """Another save of the step is loaded whole or not at all: blocks of two saves never meet."""
    other = tmp_path / "other"
    save(root, {"a": random((5 * MIB,))})
    second = random((5 * MIB,), seed=1)
    save(other, {"a": second})
    damage(part_file(root, 1), BLOCK + 5)
    with Checkpointer(root, copies=[other], journal=False) as ckpt:
        assert np.array_equal(ckpt.load(step=1)["a"], second)
        damage(part_file(other, 1), 5)
        with pytest.raises(CorruptError):
            ckpt.load(step=1)


def test_nothing_to_load(root: Path, tmp_path: Path) -> None:
    ckpt = Checkpointer(root, journal=False)
    with pytest.raises(NoCheckpointError, match="nothing has been saved there yet"):
        ckpt.load()
    with pytest.raises(NoCheckpointError):
        ckpt.metadata()
    assert not root.exists()
    save(root, {"a": random((3,))}, step=5)
    with pytest.raises(NoCheckpointError, match=r"there is no step 4[\s\S]*steps there: 5"):
        ckpt.load(step=4)
    damage(part_file(root, 5))
    with pytest.raises(NoCheckpointError, match="step 5: "):
        ckpt.load()


def test_steps_that_cannot_be_read_for_the_moment_are_not_taken_for_lost(root: Path) -> None:
    class Short(Files):
        def open_read(self, path: str) -> int:
            if path.endswith(".safetensors"):
                raise OSError(errno.EMFILE, "Too many open files")
            return super().open_read(path)

    save(root, {"a": random((3,))}, step=5)
    ckpt = Checkpointer(root, journal=False, files=Short())
    with pytest.raises(StorageError, match=r"step 5: .*Too many open files") as caught:
        ckpt.load()
    assert "try again" in str(caught.value.hint)
    damage(part_file(root, 5))
    with pytest.raises(NoCheckpointError):
        Checkpointer(root, journal=False).load()


def test_every_flipped_byte_of_a_small_step_is_caught(root: Path) -> None:
    tree: dict[str, Any] = {"a": random((40,)), "s": 3}
    save(root, tree)
    folder = root / "step-00000001"
    rng = np.random.default_rng(7)
    ckpt = Checkpointer(root, journal=False)
    for file in sorted(folder.iterdir()):
        good = file.read_bytes()
        for offset in rng.choice(len(good), min(40, len(good)), replace=False).tolist():
            damage(file, offset)
            with pytest.raises(NoCheckpointError):
                ckpt.load(into=tree)
            file.write_bytes(good)
    assert np.array_equal(ckpt.load(into=tree)["a"], tree["a"])


def test_unverified_loads_are_possible_when_asked(root: Path) -> None:
    save(root, {"a": random((MIB,))})
    damage(part_file(root, 1))
    found = Checkpointer(root, journal=False).load(step=1, verify=False)
    assert np.array_equal(found["a"][:-1], random((MIB,))[:-1])
