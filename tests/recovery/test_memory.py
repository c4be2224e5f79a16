"""A worker that takes more memory than there is: the kernel kills it, and the cause is known as such.

Where no control group can be made, the matrix has the same cells with a SIGKILL, labelled so.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.journal import StepPoisoned
from tests.recovery.memory_group import ENV, PROGRAM, memory_group
from tests.recovery.mishaps import Mishap
from tests.recovery.stage import Digests, Scene

pytestmark = [pytest.mark.process, pytest.mark.full]

LIMIT = 2 << 30
HOG = Mishap(at="lane", what="hog", slot=1, step=6)


@pytest.fixture
def group() -> Iterator[Path]:
    with memory_group(LIMIT) as made:
        if made is None:
            pytest.skip("no control group with a memory limit can be made here")
        yield made


def scene_in(group: Path, root: Path, *mishaps: Mishap) -> Scene:
    return Scene(root, mishaps, program=PROGRAM, env={ENV: str(group)})


def test_it_is_replaced_and_the_cause_is_named(group: Path, tmp_path: Path, undisturbed: Digests) -> None:
    scene = scene_in(group, tmp_path, HOG)
    assert scene.play(60.0) == 0
    scene.check(undisturbed)
    assert scene.causes() == ["out of memory"]


def test_a_step_that_never_fits_is_given_up(group: Path, tmp_path: Path, undisturbed: Digests) -> None:
    always = Mishap(at="lane", what="hog", step=6, always=True)
    scene = scene_in(group, tmp_path, always)
    assert scene.play(60.0) == 79
    scene.check_so_far(undisturbed)
    assert set(scene.causes()) == {"out of memory"}
    (poisoned,) = [one for one in scene.events() if isinstance(one, StepPoisoned)]
    assert "want of memory" in poisoned.reason
