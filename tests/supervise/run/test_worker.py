"""The process that runs a training script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import sys
import beside
print(sys.path[0])
print(sys.path.count(sys.argv[1]))
"""


@pytest.mark.process
@pytest.mark.parametrize("safe", ["", "1"])
def test_what_lies_beside_the_script_is_imported_and_no_other_path_is_lost(tmp_path: Path, safe: str) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    (tmp_path / "beside.py").write_text("")
    package = str(Path(__file__).parents[3] / "src")
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.supervise.worker", str(tmp_path / "script.py"), package],
        env={"PYTHONSAFEPATH": safe, "PYTHONPATH": package},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    first, kept = done.stdout.split()
    assert first == str(tmp_path)
    assert int(kept) >= 1
