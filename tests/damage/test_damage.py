"""Whatever happens to the bytes of a step is noticed, named, and repaired or stepped around."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from holdfast.checkpoint import Checkpointer
from holdfast.format import BLOCK
from holdfast.testing import quiet, same
from tests.damage.campaign import DAMAGES, NEW, OLD, Damage, Good, Victim, complaints

FIXED, LONG = 5, 100


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    return Good.make(tmp_path_factory.mktemp("damage"))


def campaign(good: Good, damage: Damage, place: Path, seeds: range) -> None:
    failures = []
    with quiet():
        for seed in seeds:
            victim = Victim.make(place / "victim", good, random.Random(f"{damage.__name__}/{seed}"))
            damage(victim)
            failures += [f"seed {seed}, {victim.file}: {text}" for text in complaints(victim)]
            shutil.rmtree(victim.root)
    print(f"{damage.__name__}: {len(seeds)} damaged folders, {len(failures)} complaints")
    assert not failures, "\n" + "\n".join(failures)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_caught_named_and_repaired(damage: Damage, good: Good, tmp_path: Path) -> None:
    campaign(good, damage, tmp_path, range(FIXED))


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_much_damage_is_caught_named_and_repaired(damage: Damage, good: Good, tmp_path: Path) -> None:
    campaign(good, damage, tmp_path, range(FIXED, FIXED + LONG))


def test_the_good_folder_is_good(good: Good) -> None:
    """Several parts, several blocks, and nothing to complain about."""
    checkpointer = Checkpointer(good.root, writer="thread", rank=0, world=1, journal=False)
    assert checkpointer.steps() == [OLD, NEW]
    assert checkpointer.info(NEW).num_parts == 2
    parts = list(good.root.glob("step-00000002/*.safetensors"))
    assert len(parts) == 2
    assert max(part.stat().st_size for part in parts) > BLOCK
    for step in (OLD, NEW):
        assert checkpointer.verify(step) == []
        assert same(checkpointer.load(step=step), good.trees[step])


def test_damage_outside_the_loaded_arrays_does_not_hinder(good: Good, tmp_path: Path) -> None:
    """A partial load reads and trusts only the blocks it needs."""
    victim = Victim.make(tmp_path / "victim", good, random.Random(0))
    large = max(victim.names(".safetensors"), key=lambda name: (victim.folder / name).stat().st_size)
    path = victim.own(large)
    victim.file = large
    at = path.stat().st_size // BLOCK * BLOCK  # the last block
    victim.expect(at)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff" * 16)
    checkpointer = Checkpointer(victim.root, writer="thread", rank=0, world=1, journal=False)
    assert [problem.block for problem in checkpointer.verify(NEW)] == [at // BLOCK]
    names = {name for name in ("left", "right") if name != victim.array}
    for name in names:
        loaded = checkpointer.load(step=NEW, parts=name)
        assert same(loaded, {name: good.trees[NEW][name]})
