"""What the tests on a GPU share: the GPU, and a word at the end on whether there was one.

Without one they are skipped. `HOLDFAST_REQUIRE_GPU=1` is for a machine that has one: JAX then looks for it
(see tests/conftest.py), a test that finds none fails, and so does a run in which none passed with a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Final

import jax
import pytest

_REQUIRED: Final = "HOLDFAST_REQUIRE_GPU"
_passed: Final[list[str]] = []
"""The tests that did with a GPU."""


def _required() -> bool:
    return bool(os.environ.get(_REQUIRED))


@pytest.fixture
def gpu() -> jax.Device:
    """The first GPU; no test without it."""
    try:
        return jax.devices("gpu")[0]
    except RuntimeError as error:
        text = f"no GPU here: {error}"
    if _required():
        pytest.fail(f"{text} ({_REQUIRED} is set; JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')})")
    pytest.skip(text)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and report.passed and "gpu" in getattr(item, "fixturenames", ()):
        _passed.append(report.nodeid)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _required() and not _passed and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _passed:
        found = jax.devices("gpu")
        terminalreporter.write_line(f"{len(_passed)} tests passed on {len(found)} x {found[0].device_kind}")
    else:
        terminalreporter.write_line(f"no test passed on a GPU (where there is one: {_REQUIRED}=1)")
