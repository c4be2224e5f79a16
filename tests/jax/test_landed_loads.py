"""Loads by way of landings, with arrays of the CPU backend and no driver."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from holdfast import Checkpointer, load_hub
from holdfast.arrays import Placement
from holdfast.checkpoint.hub import loading as hub_loading
from holdfast.errors import CorruptError, FormatError
from holdfast.jax import landing as landings
from holdfast.jax.placing import Made, put
from holdfast.vault import restore
from tests.checkpoint.folder import damage, part_file
from tests.checkpoint.hub.repositories import single
from tests.jax.landings import MIB, Flying, Landed, P, Struct, same, save, values


def test_arrays_go_to_the_device_of_their_sink_whatever_the_default_is(root: Path, landed: Landed) -> None:
    rng = np.random.default_rng(5)
    tree = {f"{number}": jnp.asarray(values(rng, (MIB,), np.float32)) for number in range(12)}
    assert not tree["0"].committed
    ckpt = save(root, tree)
    with jax.default_device(jax.devices()[1]):
        found = ckpt.load(into=tree)
    for name, value in tree.items():
        assert same(found[name], value)
        assert found[name].devices() == value.devices()
        assert not found[name].committed
    landed.check_over()


@pytest.mark.parametrize("seed", range(4))
def test_random_trees_and_shardings_come_back_to_the_bit(seed: int, root: Path, landed: Landed) -> None:
    rng = np.random.default_rng(seed)
    landed.budget = int(rng.choice([2, 6, 40])) * MIB
    shape = [(8,), (2, 4), (4, 2), (2, 2, 2)][seed]
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(shape), ("x", "y", "z")[: len(shape)])
    specs = [P(), P("x"), P(None, "x"), P(("x",), None), *([P("y", "x"), P(None, "y")] if seed else [])]
    tree: dict[str, Any] = {"host": values(rng, (1000,), np.float32), "free": jnp.arange(2 * MIB), "step": 7}
    tree |= {"none": jnp.zeros((0, 3)), "key": jax.random.key(seed)}
    template = dict(tree)
    for number in range(16):
        dtype = rng.choice(["float32", "bfloat16", "int8", "bool", "uint32"])
        dims = (8 * int(rng.integers(1, 200)), 8 * int(rng.integers(1, 200)))
        array = values(rng, dims, jnp.dtype(dtype))
        where = [NamedSharding(mesh, specs[int(rng.integers(len(specs)))]) for _ in range(2)]
        tree[f"{number}"] = jax.device_put(array, where[0])
        template[f"{number}"] = Struct(dims, jnp.dtype(dtype), sharding=where[1])
    found = save(root, tree).load(into=template)
    for name in set(tree) - {"step", "key"}:
        assert same(found[name], tree[name]), name
    assert same(jax.random.key_data(found["key"]), jax.random.key_data(tree["key"]))
    assert found["step"] == 7
    assert not found["free"].committed
    for number in range(16):
        assert found[f"{number}"].sharding == template[f"{number}"].sharding
    landed.check_over()


def test_a_tree_of_20_times_the_budget_never_has_more(root: Path, landed: Landed) -> None:
    rng = np.random.default_rng(1)
    tree = {f"{number}": values(rng, (4, MIB), np.uint8) for number in range(80)}
    ckpt = save(root, tree, threads=1)
    template = {name: Struct(value.shape, value.dtype) for name, value in tree.items()}
    found = ckpt.load(into=template)
    landed.check_over()
    assert landed.runtime.most <= landed.budget, "pinned"
    # All at the end: memory that was used again would show in an array that came before.
    assert all(same(found[name], value) for name, value in tree.items())


def test_a_box_wider_than_the_budget_and_one_for_all_devices(root: Path, landed: Landed) -> None:
    landed.budget = 2 * MIB
    rng = np.random.default_rng(2)
    tree = {name: values(rng, (12, MIB), np.uint8) for name in "abc"}
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    template = {
        name: Struct((12, MIB), np.uint8, sharding=NamedSharding(mesh, spec))
        for name, spec in zip("abc", (P(), P(None, "x"), P()), strict=True)
    }
    found = save(root, tree).load(into=template)
    landed.check_over()
    assert all(same(shard.data, tree["a"]) for shard in found["a"].addressable_shards)
    assert all(same(found[name], value) for name, value in tree.items())


def test_casts_leave_the_landing_at_once(root: Path, landed: Landed) -> None:
    tree = {f"{n}": np.random.default_rng(n).standard_normal((MIB,), np.float32) for n in range(20)}
    ckpt = save(root, tree, threads=1)
    template = {name: Struct((MIB,), jnp.bfloat16) for name in tree}
    found = ckpt.load(into=template, cast=True)
    landed.check_over()
    assert landed.runtime.most <= landed.budget
    for name, value in tree.items():
        assert same(found[name], value.astype(jnp.bfloat16)), name


def test_a_read_that_fails_in_the_middle_gives_the_memory_back(root: Path, landed: Landed) -> None:
    tree = {f"{n}": np.random.default_rng(n).integers(0, 256, 4 * MIB, np.uint8) for n in range(20)}
    ckpt = save(root, tree)
    damage(part_file(root, 1), 50 * MIB)
    with pytest.raises(CorruptError, match="block") as caught:
        ckpt.load(into={name: Struct((4 * MIB,), np.uint8) for name in tree}, step=1)
    landed.check_over()
    assert caught.value.block == 6
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("holdfast-read")]


def test_what_fails_while_it_is_placed_is_told_and_readers_have_ended(
    root: Path, landed: Landed, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {f"{n}": np.zeros(4 * MIB, np.uint8) for n in range(20)}
    ckpt = save(root, tree)
    placed = [0]

    def failing(*_: Any, **__: Any) -> list[Any]:
        placed[0] += 1
        raise MemoryError(f"device {placed[0]}")

    monkeypatch.setattr(landings, "put", failing)
    with pytest.raises(MemoryError, match="device 1"):
        ckpt.load(into={name: Struct((4 * MIB,), np.uint8) for name in tree})
    landed.check_over()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("holdfast-read")]


def test_an_array_that_fails_on_its_way_fails_the_load(
    root: Path, landed: Landed, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"a": np.zeros(4 * MIB, np.uint8)}
    ckpt = save(root, tree)
    lost = Flying(ValueError("the device is gone"))
    lost.arrived.set()

    def losing(batch: list[Placement], made: list[Made], *, kept: bool) -> list[Any]:
        arrays = put(batch, made, kept=kept)
        made.append(Made(made[0].host, lost))
        return arrays

    monkeypatch.setattr(landings, "put", losing)
    with pytest.raises(ValueError, match="the device is gone"):
        ckpt.load(into={"a": Struct((4 * MIB,), np.uint8)})
    landed.check_over()


def test_a_step_of_many_files_is_loaded_into_memory_of_its_own(
    root: Path, landed: Landed, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"a": jnp.arange(MIB)}
    ckpt = save(root, tree)
    monkeypatch.setattr("holdfast.checkpoint.loading._FILES", 0)
    assert same(ckpt.load(into=tree)["a"], tree["a"])
    assert not landed.made


# ---- weights of a repository, and states of a vault


@pytest.mark.parametrize("broken", [False, True], ids=["whole", "cut short"])
def test_weights_of_a_repository_land_too(
    root: Path, landed: Landed, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    monkeypatch.setattr(hub_loading, "LANDED", landed.budget // 2)
    rng = np.random.default_rng(3)
    tensors = {f"w{number}": values(rng, (2, MIB), np.float32) for number in range(12)}
    folder = single(root / "repository", tensors)
    if broken:
        read = hub_loading.HubLoad._read

        def failing(self: Any, chunk: Any, buffer: Any) -> None:
            if chunk.entry.tensor.name == "w7":
                raise FormatError("cut short")
            read(self, chunk, buffer)

        monkeypatch.setattr(hub_loading.HubLoad, "_read", failing)
    template = {name: Struct(value.shape, value.dtype) for name, value in tensors.items()}
    if broken:
        with pytest.raises(FormatError, match="cut short"):
            load_hub(folder, into=template)
    else:
        found = load_hub(folder, into=template)
        assert all(same(found[name], value) for name, value in tensors.items())
        assert landed.runtime.most <= landed.budget, "pinned"
    landed.check_over()


@pytest.mark.process
def test_a_state_of_a_vault_lands_on_any_mesh(root: Path, landed: Landed) -> None:
    rng = np.random.default_rng(4)
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    tree = {
        name: jax.device_put(values(rng, (16, MIB // 2), np.float32), NamedSharding(mesh, spec))
        for name, spec in zip("abcd", (P(), P("x"), P(None, "x"), P("x")), strict=True)
    }
    with Checkpointer(
        root, serve="127.0.0.1:0", token=b"a token of the run, for tests", journal=False
    ) as ckpt:
        ckpt.save(3, tree).durable(60.0)
        template = {
            name: Struct(tree[name].shape, tree[name].dtype, sharding=NamedSharding(mesh, spec))
            for name, spec in zip("abcd", (P("x"), P("x"), P("x"), P()), strict=True)
        }
        found = restore([ckpt.vault_address], template, token=b"a token of the run, for tests")
    assert found.step == 3
    for name, value in tree.items():
        assert same(found.tree[name], value)
        assert found.tree[name].sharding == template[name].sharding
    made = [one for one in landed.made if one.nbytes]
    assert not made
    assert landed.runtime.most, "nothing was landed"
    assert not landed.runtime.mapped
