"""`HOLDFAST_REQUIRE_GPU=1 pytest tests/gpu` on a machine without a GPU: it must not look like one with."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).parents[1] / "gpu" / "conftest.py"


@pytest.mark.parametrize(
    ("required", "test", "code", "line"),
    [
        ("", "gpu", pytest.ExitCode.OK, "*1 skipped*"),
        ("1", "gpu", pytest.ExitCode.TESTS_FAILED, "*no GPU here*HOLDFAST_REQUIRE_GPU is set*"),
        ("1", "", pytest.ExitCode.TESTS_FAILED, "*1 passed*"),
    ],
    ids=["not required", "required", "required, but no test takes it"],
)
def test_a_run_that_used_no_gpu_says_so(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    required: str,
    test: str,
    code: pytest.ExitCode,
    line: str,
) -> None:
    monkeypatch.setenv("HOLDFAST_REQUIRE_GPU", required)
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makepyfile(f"def test_one({test}): pass")
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    assert done.ret == code
    done.stdout.fnmatch_lines([line])
    done.stdout.fnmatch_lines(["no test passed on a GPU*"])
