"""torch checkpoints come in bit by bit without torch; whatever is damaged or hostile is refused by name."""

from __future__ import annotations

import os
import random
import shutil
import struct
import zipfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from holdfast.arrays import dtype
from holdfast.checkpoint.foreign import dcp, import_checkpoint, moving, plan
from holdfast.checkpoint.foreign.boxes import whole
from holdfast.checkpoint.foreign.torchsave import TensorReader, record
from holdfast.checkpoint.foreign.windows import Files
from holdfast.errors import CorruptError, FormatError, HoldfastError, MissingPathError
from tests.checkpoint.foreign.golden import DCP, STATE, assert_equal, scalars, stored, unpacked

EXPECTED = {
    **STATE,
    "empty": np.zeros((0, 3), np.float32),
    "transposed": np.ascontiguousarray(np.arange(12, dtype=np.float32).reshape(3, 4).T),
}


@pytest.mark.parametrize("name", DCP)
def test_one_writer_and_four(tmp_path: Path, name: str) -> None:
    source = unpacked(name, tmp_path)
    assert len(list(source.glob("*.distcp"))) >= int(name[-1])
    report = import_checkpoint(source, tmp_path / "ckpt", step=2)
    assert report.format == "torch DCP"
    assert_equal(stored(tmp_path / "ckpt", 2), EXPECTED)
    assert scalars(tmp_path / "ckpt", 2) == {
        "big": ("int", hex(2**70)),
        "blob": ("bytes", "00ff"),
        "groups/0/betas/0": ("float", (0.9).hex()),
        "groups/0/betas/1": ("float", (0.95).hex()),
        "groups/0/lr": ("float", (0.25).hex()),
        "groups/0/params/0": ("int", "0"),
        "groups/0/params/1": ("int", "1"),
        "name": ("str", "golden"),
        "ordered/a": ("int", "1"),
        "step": ("int", "7"),
    }
    skipped = dict(report.skipped)
    assert skipped.keys() == {"device", "groups/0/foreach"}
    assert "'torch.device', which is refused" in skipped["device"]


@pytest.mark.parametrize("name", DCP)
def test_in_pieces_of_a_few_bytes(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "BLOCK", 20)
    monkeypatch.setattr(moving, "_BLOCKS", moving.LEAST_MEMORY)
    monkeypatch.setattr("holdfast.checkpoint.foreign.dcp._SLAB", 16)
    import_checkpoint(unpacked(name, tmp_path), tmp_path / "ckpt", step=2, memory_limit=moving.LEAST_MEMORY)
    assert_equal(stored(tmp_path / "ckpt", 2), EXPECTED)


def refused(source: Path, target: Path, **options: object) -> HoldfastError:
    with pytest.raises(HoldfastError) as caught:
        import_checkpoint(source, target, step=1, **options)  # type: ignore[arg-type]
    assert not target.exists()
    return caught.value


def test_a_missing_truncated_or_half_saved_checkpoint(tmp_path: Path) -> None:
    source = unpacked("dcp-2.13.0-world4", tmp_path)
    target = tmp_path / "ckpt"
    victim = sorted(source.glob("*.distcp"))[-1]
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-100])
    error = refused(source, target)
    assert isinstance(error, FormatError)
    assert f"{victim.name} has {len(whole) - 100:,} bytes" in error.message
    victim.unlink()
    assert isinstance(refused(source, target), MissingPathError)
    (source / ".metadata").unlink()
    assert "no .metadata, which torch writes last" in refused(source, target).message


def test_flipped_bits_are_found_by_their_crc(tmp_path: Path) -> None:
    source = unpacked("dcp-2.13.0-world1", tmp_path)
    needle = STATE["params/dense/kernel"].tobytes()
    victim = next(path for path in source.glob("*.distcp") if needle in path.read_bytes())
    data = bytearray(victim.read_bytes())
    data[data.index(needle) + 5] ^= 1
    victim.write_bytes(data)
    error = refused(source, tmp_path / "ckpt")
    assert isinstance(error, CorruptError)
    assert "params.dense.kernel" in error.message
    import_checkpoint(source, tmp_path / "ckpt", step=1, check_source=False)


def test_flipped_bits_are_found_in_whatever_order_a_tensor_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that lies column by column, in tiles of a few rows: its bytes never pass by in order."""
    monkeypatch.setattr(moving, "BLOCK", 20)
    monkeypatch.setattr(moving, "_BLOCKS", moving.LEAST_MEMORY)
    monkeypatch.setattr("holdfast.checkpoint.foreign.dcp._SLAB", 16)
    source = unpacked("dcp-2.13.0-world1", tmp_path)
    needle = np.ascontiguousarray(EXPECTED["transposed"].T).tobytes()
    victim = next(path for path in source.glob("*.distcp") if needle in path.read_bytes())
    data = bytearray(victim.read_bytes())
    data[data.index(needle) + 30] ^= 1
    victim.write_bytes(data)
    error = refused(source, tmp_path / "ckpt", memory_limit=moving.LEAST_MEMORY)
    assert isinstance(error, CorruptError)
    assert "the bytes of transposed" in error.message


def test_an_array_in_several_files_is_released_after_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[str] = []
    true = dcp.DcpArray.release

    def release(array: dcp.DcpArray) -> None:
        released.append(array.source_name)
        true(array)

    monkeypatch.setattr(plan, "FILE_BYTES", 64)
    monkeypatch.setattr(dcp.DcpArray, "release", release)
    import_checkpoint(unpacked("dcp-2.13.0-world1", tmp_path), tmp_path / "ckpt", step=1)
    assert len(list((tmp_path / "ckpt" / "step-00000001").glob("*.safetensors"))) > 4
    assert released.count("params.dense.kernel") == 1


def test_all_of_a_storage_is_compared_once_also_for_parts_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zipped(tmp_path / "one", tensor_pickle(4, (2,), (1,), offset=1), {"0": bytes(16)})

    def reader() -> TensorReader:
        window = Files(str(tmp_path)).window("one", 0, os.path.getsize(tmp_path / "one"))
        tensor = record(window, "one").value
        return TensorReader(window, tensor, what="one", check=True, most=5)

    def finished(one: TensorReader) -> None:
        one.read_into(np.empty(2, np.float32), ((0, 2),))
        one.finish()

    one = reader()
    finished(one)
    monkeypatch.setattr(one._window, "read_at", None)
    one.finish()
    again = TensorReader(one._window, one._tensor, what="view", check=True, most=5)
    again.finish()  # of the same storage
    data = bytearray((tmp_path / "one").read_bytes())
    data[data.index(bytes(16)) + 15] ^= 1
    (tmp_path / "one").write_bytes(data)
    with pytest.raises(CorruptError, match="the bytes of one have CRC-32"):
        finished(reader())


def test_a_damaged_object_is_an_error_and_no_omission(tmp_path: Path) -> None:
    source = unpacked("dcp-2.13.0-world1", tmp_path)
    victim = next(path for path in source.glob("*.distcp") if b"golden" in path.read_bytes())
    victim.write_bytes(victim.read_bytes().replace(b"golden", b"Golden"))
    error = refused(source, tmp_path / "ckpt")
    assert isinstance(error, CorruptError)
    assert "data.pkl of name" in error.message
    import_checkpoint(source, tmp_path / "ckpt", step=1, check_source=False)
    assert scalars(tmp_path / "ckpt", 1)["name"] == ("str", "Golden")


def test_files_of_another_save(tmp_path: Path) -> None:
    one, two = (unpacked(name, tmp_path) for name in DCP)
    for path in two.glob("__0_*.distcp"):
        shutil.copy(path, one / path.name)
    refused(one, tmp_path / "ckpt")


HOSTILE = {
    "a command": b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R.",
    "a command by text": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
    "an instance": b"(S'true'\nios\nsystem\n.",
    "an object": b"(cos\nsystem\nS'true'\no.",
    "an extension": b"\x80\x02\x82\x01.",
    "a class of torch that is no data": b"\x80\x02ctorch.nn\nModule\n)R.",
    "a persistent id in text": b"P1\n.",
    "nothing": b"",
    "no end": b"\x80\x02]",
    "an empty stack": b"\x80\x02R.",
    "a number": b"\x80\x02K\x01.",
    "a promise of more than there is": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "itself": b"\x80\x02]q\x00h\x00a.",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_metadata(tmp_path: Path, what: str) -> None:
    source = unpacked("dcp-2.13.0-world1", tmp_path)
    (source / ".metadata").write_bytes(HOSTILE[what])
    error = refused(source, tmp_path / "ckpt")
    assert isinstance(error, FormatError)
    assert ".metadata" in error.message


def test_a_file_name_that_leads_elsewhere(tmp_path: Path) -> None:
    source = unpacked("dcp-2.13.0-world1", tmp_path)
    data = (source / ".metadata").read_bytes()
    for name in (b"/etc/hostname", b"../../secret"):
        old = b"\x8c\x0c__0_0.distcp"
        assert old in data
        (source / ".metadata").write_bytes(data.replace(old, b"\x8c" + bytes([len(name)]) + name))
        assert "lies elsewhere" in refused(source, tmp_path / "ckpt").message


def test_random_damage_never_ends_in_anything_but_an_error_of_ours(tmp_path: Path) -> None:
    source = unpacked("dcp-2.13.0-world1", tmp_path)
    chance = random.Random(7)
    files = [source / ".metadata", *source.glob("*.distcp")]
    contents = {path: path.read_bytes() for path in files}
    refusals = 0
    for round_ in range(90):
        path = files[round_ % len(files)]
        data = bytearray(contents[path])
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data[: chance.choice([len(data), chance.randrange(len(data))])])
        try:
            with closing(dcp.opened(str(source), step=1)) as found:
                for array in found.arrays:
                    if array.nbytes < 1 << 20:
                        array.read_into(np.empty(array.shape, dtype(array.dtype).numpy), whole(array.shape))
        except HoldfastError:
            refusals += 1
        path.write_bytes(contents[path])
    assert refusals > 20


def zipped(path: Path, pickled: bytes, storages: dict[str, bytes], *, compression: int = 0) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled, 0)
        for key, data in storages.items():
            archive.writestr(f"archive/data/{key}", data)


def tensor_pickle(count: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> bytes:
    def number(value: int) -> bytes:
        return b"\x8a\x08" + struct.pack("<q", value)

    def several(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    head = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(count) + b"tQ"
    return head + number(offset) + several(shape) + several(strides) + b"\x89ccollections\nOrderedDict\n)RtR."


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [((4,), (1,), 1), ((2**40, 2**40), (0, 0), 0), ((5,), (1,), 0), ((2, 2), (9, 1), 0), ((2,), (1, 1), 0)],
)
def test_a_tensor_that_is_larger_than_its_storage(
    tmp_path: Path, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> None:
    path = tmp_path / "one"
    zipped(path, tensor_pickle(4, shape, strides, offset), {"0": bytes(16)})
    window = Files(str(tmp_path)).window("one", 0, os.path.getsize(path))
    with pytest.raises(FormatError, match=r"larger than its storage|impossible shape"):
        record(window, "one")


def test_a_compressed_storage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one"
    zipped(path, tensor_pickle(4, (4,), (1,)), {"0": bytes(16)}, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(FormatError, match="missing or compressed"):
        record(Files(str(tmp_path)).window("one", 0, os.path.getsize(path)), "one")


def test_shared_references_that_describe_more_than_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.checkpoint.foreign.torchsave.MAX_VALUES", 10_000)
    bomb = b"\x80\x02K\x01" + b"".join(b"q\x00h\x00\x86" for _ in range(60)) + b"."
    zipped(tmp_path / "one", bomb, {})
    with pytest.raises(FormatError, match="more than 10,000 values"):
        record(Files(str(tmp_path)).window("one", 0, os.path.getsize(tmp_path / "one")), "one")
