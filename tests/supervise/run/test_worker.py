"""The process that runs a training script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from holdfast.errors import DeadlineError, MismatchError, NoCheckpointError, UsageError
from holdfast.supervise import worker
from holdfast.supervise.inheritance import Inheritance
from holdfast.supervise.messages import Failed

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


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What a worker that runs in this process says to its agent."""
    said: list[object] = []
    orders = SimpleNamespace(send=said.append)
    board = SimpleNamespace(phase=lambda name: name)
    given = cast(Inheritance, SimpleNamespace(folder=tmp_path, orders=orders, board=board))
    monkeypatch.setattr(worker, "inheritance", lambda: given)
    monkeypatch.setattr(worker, "_dump_on_signal", lambda folder: None)
    monkeypatch.setattr("holdfast.supervise.garbage.defer", lambda: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    return said


def run_script(tmp_path: Path, text: str) -> int:
    path = tmp_path / "script.py"
    path.write_text(text)
    return worker.main([str(path)])


@pytest.mark.parametrize(
    ("text", "code", "reason"),
    [
        ("raise KeyError", 1, "KeyError"),
        ("raise ValueError('a\\n  b')", 1, "ValueError: a b"),
        ("raise ValueError('x ' * 1000)", 1, "ValueError:" + " x" * 242 + " ..."),
        (
            "from holdfast.errors import UsageError\nraise UsageError('no', hint='yes')",
            78,
            "UsageError: no",
        ),
        ("x = (", 78, "SyntaxError: '(' was never closed (script.py, line 1)"),
    ],
)
def test_the_reason_is_the_error_and_not_its_hint(
    text: str, code: int, reason: str, tmp_path: Path, words: list[object]
) -> None:
    assert run_script(tmp_path, text) == code
    assert words == [Failed(reason)]


def test_an_exit_because_of_an_error_says_which(tmp_path: Path, words: list[object]) -> None:
    text = "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise SystemExit(75) from error"
    with pytest.raises(SystemExit):
        run_script(tmp_path, text)
    with pytest.raises(SystemExit):
        run_script(tmp_path, "import sys\nsys.exit('no data')")
    with pytest.raises(SystemExit):
        run_script(tmp_path, "import sys\nsys.exit(3)")
    assert words == [Failed("ZeroDivisionError: division by zero"), Failed("no data")]


def test_people_see_the_frames_of_their_script(
    tmp_path: Path, words: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    run_script(tmp_path, "import json\njson.loads('{')")
    shown = capsys.readouterr().err
    assert shown.splitlines()[1] == f'  File "{tmp_path}/script.py", line 2, in <module>'
    assert "runpy" not in shown
    assert "decoder.py" in shown
    # A wrong call of Holdfast is a mistake in the script, not within.
    run_script(tmp_path, "import holdfast\nholdfast.join(world='x')")
    frames = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  File")]
    assert frames == [f'  File "{tmp_path}/script.py", line 2, in <module>']


def test_what_can_never_work_is_not_tried_again() -> None:
    errors = (UsageError("x"), MismatchError(["x"]), NoCheckpointError("x"), DeadlineError("x"), OSError("x"))
    assert [worker.exit_code(error) for error in errors] == [78, 78, 78, 75, 1]
    # Of other files than the script: of data, perhaps, which may be another next time.
    assert worker.exit_code(SyntaxError("x", ("<data>", 1, 1, "")), "script.py") == 1
