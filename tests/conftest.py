"""What the tests share: eight virtual CPU devices, a checkpoint folder, and children that always end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Landing must not hang on a dice: the same examples each time. `make test-full` looks for new ones, and what
# it finds becomes an @example.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile("same")

# Before anything imports jax. Optimising the small programs of the tests costs more than running them; on a
# GPU (see tests/gpu/conftest.py) they are to be those that a run has.
_ON_GPU = bool(os.environ.get("HOLDFAST_REQUIRE_GPU"))
_XLA = ("--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0")
os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *_XLA[: 1 if _ON_GPU else 2]])
os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu" if _ON_GPU else "cpu")

# A shell's background job ignores Ctrl-C, and so would every child of it, for ever: tests send it to theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from holdfast import faults  # noqa: E402
from tests.checkpoint.children import Children  # noqa: E402
from tests.storage.objects import faulty, moto_server  # noqa: E402, F401


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint folder that does not exist yet."""
    return tmp_path / "ckpt"


@pytest.fixture
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Children]:
    """Starts child processes; all of them, and whatever they started, are ended afterwards."""
    monkeypatch.delenv(faults.ENV, raising=False)
    started = Children(tmp_path)
    # What the test process itself spawns (a vault) is found by the same mark.
    monkeypatch.setenv(*started.mark)
    try:
        yield started
    finally:
        started.end_all()


@pytest.fixture
def armed() -> Iterator[None]:
    """Turns the fault sites of this process off afterwards."""
    yield
    faults.disarm()
