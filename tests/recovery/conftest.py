"""The states of an undisturbed run, which every cell is compared with."""

from __future__ import annotations

import pytest

from tests.recovery.stage import Digests, alone


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Digests:
    return alone(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="session")
def undisturbed_world(tmp_path_factory: pytest.TempPathFactory) -> Digests:
    """Of a run without lanes."""
    return alone(tmp_path_factory.mktemp("alone"), "--no-lanes")
