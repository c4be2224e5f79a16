"""Executables out of bundles: the same bits, donation and shardings, and no bundle that may not be used."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import Mesh

from holdfast.xla import Bundle, Executable, compiled
from holdfast.xla.bundle import digest
from tests.checkpoint.children import Children, await_state
from tests.xla.programs import KEY, ShapeDtypeStruct, compile_here, flat, placed, step, values


def the_file(folder: Path) -> Path:
    (found,) = folder.glob("*.bundle")
    return found


def ran(made: Executable) -> bytes:
    return flat(made(jax.tree.map(jnp.asarray, values()[0]), jnp.asarray(values()[1])))


def test_a_loaded_one_gives_the_bits_of_a_fresh_one(tmp_path: Path) -> None:
    fresh, loaded = compile_here(str(tmp_path)), compile_here(str(tmp_path))
    assert (fresh.source, loaded.source) == ("compiler", "bundle")
    assert fresh.digest == loaded.digest
    assert fresh.program == loaded.program
    plain = flat(jax.jit(step)(*values()))
    assert ran(fresh) == ran(loaded) == plain


def test_donation_and_shardings_are_kept(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    fn, args = placed(mesh)
    plain = fn(*args)
    outs = []
    for source in ("compiler", "bundle"):
        _, (state, batch) = placed(mesh)
        made = compiled(fn, state, batch, folder=tmp_path, key=KEY, name="step")
        assert made.source == source
        out = made(state, batch)
        assert all(array.is_deleted() for array in state.values())
        assert not batch.is_deleted()
        assert jax.tree.map(lambda a: a.sharding, out) == jax.tree.map(lambda a: a.sharding, plain)
        outs.append(flat(out))
    assert outs == [flat(plain)] * 2
    header = Bundle.opened(the_file(tmp_path).read_bytes(), KEY).header
    assert header.donated == (0, 1)
    assert header.place.num_devices == 4
    assert [leaf.name for leaf in header.outputs] == ["[0]['in']", "[0]['out']", "[1]"]


def test_shapes_alone_are_enough(tmp_path: Path) -> None:
    first = compile_here(str(tmp_path))
    shapes = jax.tree.map(lambda a: ShapeDtypeStruct(a.shape, a.dtype), values())
    made = compiled(jax.jit(step, donate_argnums=0), *shapes, folder=tmp_path, key=KEY, name="step")
    assert (made.source, made.digest) == ("bundle", first.digest)


@pytest.mark.process
def test_a_warm_compile_cache_does_not_get_into_the_bundle(tmp_path: Path, children: Children) -> None:
    """An executable out of JAX's cache serialises into a file that loads and then fails when it runs."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    warm = "import jax; from tests.xla.programs import *; jax.jit(step, donate_argnums=0)(*values())"
    for command in (
        ("-c", warm),
        ("-c", warm + "; compile_here(FOLDER)".replace("FOLDER", repr(str(tmp_path)))),
    ):
        child = children.python(*command, **cache)
        assert child.end() == 0, child.errors()
    assert list((tmp_path / "cache").iterdir())
    loaded = compile_here(str(tmp_path))
    assert loaded.source == "bundle"
    assert ran(loaded) == flat(jax.jit(step)(*values()))


def test_the_bundle_of_another_program_is_not_found(tmp_path: Path) -> None:
    compile_here(str(tmp_path))
    other = compiled(lambda s, b: (s, b.sum()), *values(), folder=tmp_path, key=KEY, name="step")
    assert other.source == "compiler"
    assert other.refused == ""
    assert len(list(tmp_path.glob("*.bundle"))) == 2


def test_a_thread_count_that_is_said_is_the_one_that_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between a run of one and its launch, which sets NPROC."""
    monkeypatch.delenv("NPROC", raising=False)
    alone = compile_here(str(tmp_path))
    monkeypatch.setenv("NPROC", str(len(os.sched_getaffinity(0))))
    launched = compile_here(str(tmp_path))
    assert (launched.source, launched.digest, launched.refused) == ("bundle", alone.digest, "")


def damage(path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = path.read_bytes()
    match how:
        case "altered":
            path.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
        case "cut off":
            path.write_bytes(data[: len(data) // 2])
        case "empty":
            path.write_bytes(b"")
        case "link":
            path.rename(path.with_suffix(".away"))
            path.symlink_to(path.with_suffix(".away"))
        case "nproc":
            monkeypatch.setenv("NPROC", "17")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("altered", "its seal is not right"),
        ("cut off", "its seal is not right"),
        ("empty", "which is no bundle"),
        ("link", "cannot open"),
        ("nproc", f"made for nproc '{len(os.sched_getaffinity(0))}', and here it is '17'"),
    ],
)
def test_what_is_refused_is_said_and_replaced(
    how: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("NPROC", raising=False)
    first = compile_here(str(tmp_path))
    damage(the_file(tmp_path), how, monkeypatch)
    with caplog.at_level(logging.WARNING):
        again = compile_here(str(tmp_path))
    assert again.source == "compiler"
    assert reason in again.refused
    assert len([record for record in caplog.records if reason in record.getMessage()]) == 1
    assert ran(again) == ran(first)
    third = compile_here(str(tmp_path))
    assert (third.source, third.digest, third.refused) == ("bundle", again.digest, "")


def test_bytes_that_the_runtime_refuses(tmp_path: Path) -> None:
    compile_here(str(tmp_path))
    path = the_file(tmp_path)
    good = Bundle.opened(path.read_bytes(), KEY)
    junk = b"no executable"
    header = msgspec.structs.replace(good.header, payload_bytes=len(junk), payload_digest=digest(junk))
    path.write_bytes(Bundle(header, junk).sealed(KEY))
    again = compile_here(str(tmp_path))
    assert again.source == "compiler"
    assert "the runtime refused the executable" in again.refused
    assert compile_here(str(tmp_path)).source == "bundle"


def test_a_folder_that_cannot_be_written_costs_the_bundle_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    made = compile_here(str(tmp_path / "file" / "below"))
    assert made.source == "compiler"
    assert made.digest is not None
    assert ran(made) == flat(jax.jit(step)(*values()))


def test_callbacks_are_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fn(x: Any) -> Any:
        return jax.pure_callback(lambda v: np.asarray(v) + 1, ShapeDtypeStruct((3,), np.float32), x)

    made = compiled(fn, jnp.zeros(3), folder=tmp_path, key=KEY, name="calls")
    assert made(jnp.zeros(3)).tolist() == [1.0, 1.0, 1.0]
    assert made.digest is None
    assert list(tmp_path.glob("*.bundle")) == []
    assert "calls back into Python" in caplog.text


def test_an_error_of_the_compile_is_the_caller_s(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        compiled(step, 1, folder=tmp_path, key=KEY, name="step")
    assert compile_here(str(tmp_path)).source == "compiler"


@pytest.mark.process
def test_one_process_compiles_and_the_others_load(tmp_path: Path, children: Children) -> None:
    processes = [children.python("-m", "tests.xla.programs", tmp_path, NPROC="1") for _ in range(3)]
    lines = [process.until("made") for process in processes]
    assert sorted(line["source"] for line in lines) == ["bundle", "bundle", "compiler"]
    assert len({line["digest"] for line in lines}) == 1
    assert len({line["bits"] for line in lines}) == 1


@pytest.mark.process
def test_one_that_dies_while_it_compiles_keeps_nobody_waiting(tmp_path: Path, children: Children) -> None:
    folder = tmp_path / "bundles"
    first = children.python("-m", "tests.xla.programs", folder, "hold")
    first.until("compiling")
    await_state(first.pid, "T")
    second = children.python("-m", "tests.xla.programs", folder)
    first.kill()
    assert second.until("made")["source"] == "compiler"
    assert sorted(os.listdir(folder)) == sorted(["lock", the_file(folder).name])
