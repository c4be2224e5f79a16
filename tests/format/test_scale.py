"""What a load of a large checkpoint reads, and what its commit sends: bounded by the need, not by the run.

The same synthetic states as `python -m bench scale`, smaller. Counts are asserted, never times.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bench.scale import shards
from bench.scale.agreement import Simulation, ballots_of
from bench.scale.reading import CountingFiles, wanted
from bench.scale.scales import Scale
from bench.scale.synthetic import SMALL, STEP, Mesh, Model, Writers, layouts, write_step
from holdfast import format as fmt
from holdfast.arrays import flatten_tree, spread, unflatten
from holdfast.checkpoint import committed_steps
from holdfast.checkpoint.loading import LoadOptions, ReadPlan, StepLoad
from holdfast.checkpoint.saving import SavePlanner
from holdfast.checkpoint.steps import step_manifest
from holdfast.checkpoint.upkeep import in_flight, leftovers
from holdfast.coord import SharedFolderAgreement
from holdfast.storage import LocalStore
from holdfast.vault.commit import COLLECTORS, Commit
from holdfast.vault.messages import Order, Recipe

_MODEL = Model(layers=2, hidden=20_480, ffn=40_960, vocab=40_960, kv=5_120)
_WRITERS = Mesh(data=64, tensor=4)
_SCALE = Scale(_MODEL, _WRITERS, Mesh(data=8, tensor=4), steps=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of 256 writers."""
    place = tmp_path_factory.mktemp("scale")
    write_step(place, Writers(_MODEL, _WRITERS))
    return place


def _planned(store: LocalStore, rank: int) -> ReadPlan:
    manifest = step_manifest(store, STEP)
    with shards.known():
        load = StepLoad(manifest, wanted(_SCALE), LoadOptions(), rank=rank, world=_SCALE.readers.world)
        return load.planned([store])


def test_the_synthetic_parts_are_those_of_a_real_save() -> None:
    writers = Writers(_MODEL, _WRITERS)
    state = layouts(_MODEL, _WRITERS)
    tree = unflatten({name: shards.Shard(layout) for name, layout in state.items()})
    with shards.known():
        for rank in (0, 100, 255):
            plan = SavePlanner(rank, _WRITERS.world).plan(flatten_tree(tree))
            part = writers.part(rank)
            index = fmt.decode_index(part.index)
            assert (part.size, index.slices) == (plan.size, plan.slices)
            assert plan.arrays == writers.arrays


def test_every_index_of_a_synthetic_step_is_what_its_manifest_says(folder: Path) -> None:
    store = LocalStore(folder)
    name = fmt.step_folder(STEP)
    manifest = fmt.read_manifest(store, name)
    for entry in manifest.parts[::37]:
        fmt.read_index(store, name, manifest, entry.part)


def test_a_reader_opens_one_manifest_and_the_indexes_of_its_own_parts(folder: Path) -> None:
    files = CountingFiles()
    plan = _planned(LocalStore(folder, files=files), rank=9)
    manifest = (folder / fmt.step_folder(STEP) / fmt.MANIFEST).stat().st_size
    indexes = sum(
        (folder / fmt.step_folder(STEP) / fmt.index_name(part, "a1")).stat().st_size for part in plan.indexes
    )
    assert files.opened_files == 1 + len(plan.indexes)
    assert files.bytes_read == manifest + indexes
    # A 1/32 of each array lies with 8 of the 256 writers in each of three layouts, some of them the same;
    # ragged edges and norms add to that. One that asked everybody, or wrote small arrays anywhere, has more.
    assert 8 <= len(plan.indexes) <= 32


def test_neighbouring_pieces_of_replicated_arrays_lie_with_neighbouring_writers() -> None:
    written = spread(layouts(_MODEL, _WRITERS))
    shared = [name for name in written if name.startswith("params/layers") and "norm" not in name]
    near: set[int] = set()
    for name in shared:
        array = written[name]
        rows = array.boxes[:, :, 0] / np.array(array.shape)
        dim = 1 - int(np.argmax([len(set(rows[:, d].tolist())) == _WRITERS.tensor for d in range(2)]))
        near.update(array.table.ids[rows[:, dim] < 1 / 8].tolist())
    # The first eighth of every array: mostly with the first eighth of each group, never with everybody.
    assert len(near) <= 3 * _WRITERS.world // 8
    loads: dict[int, int] = {}
    for array in written.values():
        for owner, volume in zip(array.table.ids.tolist(), array.geometry.volumes.tolist(), strict=True):
            loads[owner] = loads.get(owner, 0) + volume * array.itemsize
    assert max(loads.values()) <= 1.1 * min(loads.values())


def test_equal_grids_are_decoded_once(folder: Path) -> None:
    manifest = fmt.read_manifest(LocalStore(folder), fmt.step_folder(STEP))
    by_cuts = {entry.cuts: id(entry.cuts) for entry in manifest.arrays}
    assert len({id(entry.cuts) for entry in manifest.arrays}) == len(by_cuts)
    assert len(by_cuts) < len(manifest.arrays) / 3


def test_nothing_looks_into_steps_that_are_there_already(folder: Path) -> None:
    files = CountingFiles()
    store = LocalStore(folder, files=files)
    assert committed_steps(store) == [STEP]
    assert in_flight(store) == []
    assert leftovers(store) == []
    assert files.opened_files == 0


@pytest.mark.parametrize("writers", [64, 512])
def test_what_the_coordinator_handles_grows_with_the_writers_not_with_their_square(writers: int) -> None:
    ballots = [b"x" * 180] * writers
    traffic = Simulation(writers).commit(ballots)
    assert traffic.messages_in <= 3 * writers + 3 * COLLECTORS
    assert traffic.messages_out <= (3 + 1 + COLLECTORS) * (writers + COLLECTORS)
    assert traffic.bytes_out <= (COLLECTORS + 1) * writers * 400


def _commit(store: LocalStore, writers: Writers, rank: int) -> Commit:
    """What the vault of one rank does once its part is durable, up to the vote."""
    index = fmt.decode_index(writers.part(rank).index)
    recipe = Recipe(0, rank, index.files[0].size, index.slices, writers.arrays)
    order = Order(0, 0, 0, writers.save, 1.7e9, (), b"{}", deadline_s=60.0)
    agreement = SharedFolderAgreement(store.below("agreement"), rank=rank, world=writers.world)
    return Commit(store, agreement, order, recipe)


def _asked(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The ranks that ask for all ballots from here on."""
    asked: set[int] = set()
    plain = SharedFolderAgreement.ballots

    def ballots(self: SharedFolderAgreement, topic: str, timeout_s: float) -> Mapping[int, bytes]:
        asked.add(self.rank)
        return plain(self, topic, timeout_s)

    monkeypatch.setattr(SharedFolderAgreement, "ballots", ballots)
    return asked


def test_only_a_few_ranks_gather_the_ballots_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _asked(monkeypatch)
    store, writers = _folder_for(tmp_path, Writers(SMALL, Mesh(6, 2)))
    with ThreadPoolExecutor(writers.world) as pool:
        runs = [
            pool.submit(
                _commit(store, writers, rank).run,
                writers.part(rank).index,
                fmt.ArrayTable(writers.arrays),
                None,
            )
            for rank in range(writers.world)
        ]
        for run in runs:
            run.result(60.0)
    assert asked == set(range(COLLECTORS))
    assert fmt.read_manifest(store, writers.folder).save == writers.save


def test_any_rank_finishes_for_those_that_died_after_the_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = _asked(monkeypatch)
    monkeypatch.setattr("holdfast.vault.commit._TAKEOVER_S", 0.05)
    store, writers = _folder_for(tmp_path, Writers(SMALL, Mesh(6, 2)))
    last = writers.world - 1
    for rank in range(last):
        _commit(store, writers, rank)._vote(writers.part(rank).index, fmt.ArrayTable(writers.arrays), None)
    decided = SharedFolderAgreement(store.below("agreement"), rank=0, world=writers.world)
    decided.decide(f"{STEP}.a1", b"commit")
    _commit(store, writers, last).run(writers.part(last).index, fmt.ArrayTable(writers.arrays), None)
    assert asked == {last}
    assert len(fmt.read_manifest(store, writers.folder).parts) == writers.world


def _folder_for(path: Path, writers: Writers) -> tuple[LocalStore, Writers]:
    store = LocalStore(path)
    for name in ("agreement", writers.folder):
        store.make_folder(name)
    return store, writers


def test_the_ballots_of_a_save_name_its_parts(folder: Path) -> None:
    writers = Writers(_MODEL, _WRITERS)
    parts = [writers.part(rank).entry for rank in range(8)]
    sizes = [len(ballot) for ballot in ballots_of(writers, parts)]
    assert max(sizes) < 300
    manifest = (folder / fmt.step_folder(STEP) / fmt.MANIFEST).read_bytes()
    assert fmt.saved_by(manifest[: fmt.HEAD]) == writers.save
    assert fmt.saved_by(manifest[:40]) is None
    assert fmt.saved_by(b"x" + manifest[: fmt.HEAD]) is None


def test_the_head_of_a_manifest_holds_the_longest_save_id() -> None:
    save = fmt.SaveId("r" * 64, 2**63 - 1, "a" * 64)
    data = fmt.encode_manifest(fmt.Manifest(save=save, created=0.0, nbytes=0, parts=(), arrays=()))
    assert fmt.saved_by(data[: fmt.HEAD]) == save
    assert msgspec.json.decode(data)["save"]["step"] == 2**63 - 1
