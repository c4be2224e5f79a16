"""What a capture copies: every leaf once for a block, in one call or in several, and no byte beside it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from holdfast.arrays import NUMPY, flatten_tree
from holdfast.arrays.copying import address_of
from holdfast.checkpoint.saving import Capture, SavePlanner
from holdfast.format import BLOCK
from holdfast.vault import Crew


def captured(tree: Any, helpers: int = 1) -> tuple[bytes, list[int]]:
    """The image of a tree, and what was told on the way."""
    flat = flatten_tree(tree)
    plan = SavePlanner(0, 1).plan(flat)
    image = np.zeros(plan.size, np.uint8)
    told: list[int] = []
    crew = Crew(1, "test-capture")
    try:
        Capture(plan, flat.leaves, address_of(image), told.append).run(crew, helpers)
    finally:
        crew.close(10.0)
    for piece in plan.slices:
        found = image[piece.offset : piece.offset + piece.nbytes].tobytes()
        assert found == np.ascontiguousarray(tree[piece.name]).tobytes(), piece.name
    return image.tobytes(), told


def mixed() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    tree = {f"small{at:03}": rng.integers(0, 256, at, dtype=np.uint8) for at in range(300)}
    return tree | {
        "turned": np.asfortranarray(rng.normal(size=(300, 700))),
        "every other": rng.normal(size=(50, 40))[:, ::2],
        "large": rng.normal(size=3 << 20),
    }


def test_small_large_and_strided_leaves_share_blocks() -> None:
    image, told = captured(mixed())
    assert told[-1] == len(image)
    assert told == sorted(told)


def test_a_leaf_that_must_be_copied_is_copied_once_for_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[int] = Counter()
    memory = type(NUMPY).memory

    def counted(self: Any, leaf: Any, ordinal: int) -> Any:
        asked[id(leaf)] += 1
        return memory(self, leaf, ordinal)

    tree = mixed()
    plan = SavePlanner(0, 1).plan(flatten_tree(tree))
    blocks = Counter(leaf for block in plan.blocks for leaf in {copy.leaf for copy in block})
    monkeypatch.setattr(type(NUMPY), "memory", counted)
    captured(tree)
    leaves = flatten_tree(tree).leaves
    assert asked == Counter({id(leaves[at]): number for at, number in blocks.items()})


def test_the_writer_is_told_of_a_sixteenth_and_then_of_quarters() -> None:
    image, told = captured({"large": np.ones(8 * BLOCK, np.uint8)}, helpers=0)  # the header makes it nine
    assert told == [BLOCK, 4 * BLOCK, 7 * BLOCK, len(image)]
