"""`python -m holdfast.train`: a mistake is a sentence, and the exit code says whether to try again."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import DataError, DeadlineError, DivergedError, NoCheckpointError, UsageError
from holdfast.train import __main__ as program
from holdfast.train.program import Outcome
from tests.train.tiny import tiny


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[object, str]:
    """The exit code, and what is said."""
    with pytest.raises(SystemExit) as ended:
        program.main(list(map(str, arguments)))
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "Traceback" not in said
    return ended.value.code, said


def test_wrong_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, options = tmp_path / "config.json", tmp_path / "options.json"
    config.write_text(tiny().to_json().replace('"hidden"', '"hiden"'), encoding="utf-8")
    usage = "hint: python -m holdfast.train CONFIG.json [OPTIONS.json]"
    for arguments, says in (
        ((), usage),
        ((config, options, options), usage),
        ((options,), "options.json: No such file"),
        ((config,), "did you mean model.hidden?"),
    ):
        code, said = refused(capsys, *arguments)
        assert code == 78
        assert says in said
    config.write_text(tiny().to_json(), encoding="utf-8")
    for text, says in (("[", "holds no options"), ('{"laod": []}', "did you mean load?")):
        options.write_text(text, encoding="utf-8")
        assert refused(capsys, config, options)[0] == 78
        assert says in refused(capsys, config, options)[1]


def test_a_run_that_was_stopped_is_to_be_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.json"
    config.write_text(tiny().to_json(), encoding="utf-8")
    for stopped in (False, True):
        done = Outcome(
            name="tiny",
            folder=tmp_path,
            steps=4,
            samples=32,
            loss=1.0,
            state="ab",
            ledger="cd",
            stopped=stopped,
        )
        monkeypatch.setattr(program, "run_training", lambda *_, done=done: done)
        if stopped:
            with pytest.raises(SystemExit) as ended:
                program.main([str(config)])
            assert ended.value.code == 75
        else:
            program.main([str(config)])
        told = capsys.readouterr()
        assert told.out == "4 steps, state ab, ledger cd\n"
        assert ("stopped" in told.err) == stopped


def unreadable(number: int) -> DataError:
    """What a data file gives that the file system refuses to read."""
    error = DataError("set.bin, byte 0: cannot be read")
    error.__cause__ = OSError(number, "why")
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        pytest.param(UsageError("other settings", hint="--accept seed"), 78, id="usage"),
        pytest.param(DataError("set.idx, byte 0: damaged", hint="make it again"), 78, id="data"),
        pytest.param(NoCheckpointError("no such step", hint="give another"), 78, id="checkpoint"),
        pytest.param(unreadable(errno.ENOENT), 78, id="missing file"),
        # What may be over at the next try is tried again.
        pytest.param(unreadable(errno.EIO), 1, id="failing disk"),
        pytest.param(DeadlineError("nobody came"), 75, id="deadline"),
        pytest.param(DivergedError("slot 1 differs"), 1, id="diverged"),
    ],
)
def test_errors_of_a_run(
    error: Exception,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*given: Any) -> None:
        raise error

    monkeypatch.setattr(program, "run_training", failing)
    config = tmp_path / "config.json"
    config.write_text(tiny().to_json(), encoding="utf-8")
    found, said = refused(capsys, config)
    assert found == code
    assert str(error) in said
