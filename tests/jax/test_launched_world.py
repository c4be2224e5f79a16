"""A replica of two workers under `holdfast launch`: one is killed, both are replaced, with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.journal import WorkerExited, read
from tests.checkpoint.children import Children

pytestmark = pytest.mark.process


def launch(children: Children, folder: Path, *args: object, parked: int = 0) -> dict[str, bytes]:
    """Run the script to its end; what its workers wrote."""
    folder.mkdir()
    script = Path(__file__).with_name("world_script.py")
    options = ["--workers-per-replica", 2, "--parked", parked, "--nproc", 1, "--plain", "--folder", folder]
    options += ["--step-s", 2]
    child = children.python("-m", "holdfast.cli", "launch", *options, script, folder, *args)
    assert child.end() == 0, child.errors()
    return {path.name: path.read_bytes() for path in folder.glob("*-[01]")}


@pytest.mark.full
@pytest.mark.timeout(240)
def test_one_goes_wrong_in_mid_run(children: Children, tmp_path: Path) -> None:
    undisturbed = launch(children, tmp_path / "calm")
    assert sorted(undisturbed) == ["bits-0", "bits-1", "source-0", "source-1"]
    for how, cause in (("kill", "crashed"), ("desert", "hung")):
        folder = tmp_path / how
        disturbed = launch(children, folder, 17, how, parked=2)
        assert (folder / "failed").exists()
        assert disturbed["source-0"] == disturbed["source-1"] == b"bundle"
        for name in ("bits-0", "bits-1"):
            assert disturbed[name] == undisturbed[name]
        ends = [one.event for one in read(folder / "run" / "journal.jsonl")]
        causes = {one.cause for one in ends if isinstance(one, WorkerExited)}
        assert causes - {"done", "killed"} == {cause}
    children.await_all_ended()
