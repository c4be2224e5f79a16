"""A replica of two workers under `holdfast launch`: one goes wrong, both are replaced, with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.journal import WorkerExited, WorkerHung, read
from tests.checkpoint.children import Children

pytestmark = pytest.mark.process


def launch(children: Children, folder: Path, *args: object, parked: int = 0) -> dict[str, bytes]:
    """Run the script to its end; what its workers wrote."""
    folder.mkdir()
    script = Path(__file__).with_name("world_script.py")
    options = ["--workers-per-replica", 2, "--parked", parked, "--nproc", 1, "--plain", "--folder", folder]
    options += ["--step-s", 2, "--deadline", "compile=5", "--deadline", "save=5"]
    child = children.python("-m", "holdfast.cli", "launch", *options, script, folder, *args)
    assert child.end() == 0, child.errors()
    return {path.name: path.read_bytes() for path in folder.glob("*-[01]")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, bytes]]:
    """What the workers of a run write that nobody disturbs."""
    started = Children(tmp_path_factory.mktemp("calm"))
    try:
        yield launch(started, tmp_path_factory.mktemp("calm") / "run")
    finally:
        started.end_all()


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("at", "how", "cause", "hung"),
    [
        (17, "kill", "crashed", set()),
        (17, "step", "hung", {(0, "step"), (1, "step")}),
        # Not the one that waits in the collective meanwhile, though its step has the shorter deadline.
        (17, "compile", "hung", {(1, "compile")}),
        (19, "save", "hung", {(1, "save")}),
    ],
)
def test_one_goes_wrong_in_mid_run(
    at: int,
    how: str,
    cause: str,
    hung: set[tuple[int, str]],
    children: Children,
    tmp_path: Path,
    undisturbed: dict[str, bytes],
) -> None:
    assert sorted(undisturbed) == ["bits-0", "bits-1", "source-0", "source-1"]
    folder = tmp_path / how
    disturbed = launch(children, folder, at, how, parked=2)
    assert (folder / "failed").exists()
    assert disturbed["source-0"] == disturbed["source-1"] == b"bundle"
    for name in ("bits-0", "bits-1"):
        assert disturbed[name] == undisturbed[name]
    events = [one.event for one in read(folder / "run" / "journal.jsonl")]
    causes = {one.cause for one in events if isinstance(one, WorkerExited)}
    assert causes - {"done", "killed"} == {cause}
    found = [one for one in events if isinstance(one, WorkerHung)]
    assert {(one.slot, one.phase) for one in found} == hung
    children.await_all_ended()
