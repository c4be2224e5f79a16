"""Against the libraries themselves, where they are installed: Orbax restores, torch saves."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.foreign import import_checkpoint
from tests.checkpoint.foreign.golden import STATE, assert_equal, stored
from tests.house.rooms import REPO

pytestmark = [pytest.mark.full, pytest.mark.process]

needs_orbax = pytest.mark.skipif(
    importlib.util.find_spec("orbax") is None, reason="orbax-checkpoint is not installed"
)
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def ran(code: str, *args: str | Path, timeout_s: float = 300.0) -> str:
    """What a Python program printed; the libraries' warnings are not this suite's."""
    env = {**os.environ, "PYTHONPATH": str(REPO), "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, args)]
    done = subprocess.run(
        command, env=env, cwd=REPO, timeout=timeout_s, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


SAVE_AND_EXPORT = """
import sys
from holdfast import Checkpointer
from holdfast.checkpoint.foreign import export_orbax
from tests.checkpoint.foreign.make_orbax import tree
state = tree()
with Checkpointer(sys.argv[1] + "/ckpt", writer="thread", journal=False) as ckpt:
    ckpt.save(3, state).durable(timeout_s=60)
for target in ("/alone", "/manager/3/default"):
    export_orbax(sys.argv[1] + "/ckpt", sys.argv[1] + target, empty=["opt/1", "nothing"])
"""

RESTORE = """
import sys, jax, numpy as np, orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from tests.checkpoint.foreign.make_orbax import tree
state = tree()
del state["bare"]  # a dict without entries is nothing to Holdfast

def same(one, two):
    if hasattr(two, "dtype") and jax.dtypes.issubdtype(two.dtype, jax.dtypes.prng_key):
        assert one.dtype == two.dtype, (one.dtype, two.dtype)
        one, two = jax.random.key_data(one), jax.random.key_data(two)
    if hasattr(two, "dtype"):
        assert (one.dtype, one.shape) == (two.dtype, two.shape), (one, two)
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()
    else:
        assert type(one) is type(two) and one == two, (one, two)

like = jax.tree.map(lambda x: ocp.utils.to_shape_dtype_struct(x) if isinstance(x, jax.Array) else x, state)
args = ocp.checkpoint_utils.construct_restore_args(like)
found = ocp.PyTreeCheckpointer().restore(sys.argv[1] + "/alone", item=like, restore_args=args)
jax.tree.map(same, found, state)
assert jax.tree.structure(found) == jax.tree.structure(state)
kernel = found["params"]["dense"]["kernel"]
assert kernel.sharding == state["params"]["dense"]["kernel"].sharding and len(kernel.addressable_shards) == 4
plain = ocp.StandardCheckpointer().restore(sys.argv[1] + "/alone")
assert isinstance(plain["layers"], list) and plain["name"] == "golden" and plain["step"] == 7
with ocp.CheckpointManager(sys.argv[1] + "/manager") as manager:
    assert manager.latest_step() == 3
    again = manager.restore(3, args=ocp.args.PyTreeRestore(item=like, restore_args=args))
jax.tree.map(same, again, state)
print("equal")
"""


@needs_orbax
def test_orbax_restores_an_export_bit_by_bit(tmp_path: Path) -> None:
    ran(SAVE_AND_EXPORT, tmp_path)
    assert ran(RESTORE, tmp_path).strip() == "equal"


@needs_orbax
def test_orbax_saves_and_we_import(tmp_path: Path) -> None:
    """The installed version, whichever it is, besides those of the golden checkpoints."""
    code = """
import sys, orbax.checkpoint as ocp
from tests.checkpoint.foreign.make_orbax import tree
with ocp.StandardCheckpointer() as checkpointer:
    state = {name: value for name, value in tree().items() if name not in ("name", "key", "keys")}
    checkpointer.save(sys.argv[1] + "/orbax", state)
"""
    ran(code, tmp_path)
    import_checkpoint(tmp_path / "orbax", tmp_path / "ckpt", step=1)
    assert_equal(stored(tmp_path / "ckpt", 1), STATE)


@needs_torch
def test_torch_saves_from_two_processes_and_we_import(tmp_path: Path) -> None:
    ran("from tests.checkpoint.foreign.make_dcp import main; main()", tmp_path / "dcp", "2")
    import_checkpoint(tmp_path / "dcp", tmp_path / "ckpt", step=1)
    found = stored(tmp_path / "ckpt", 1)
    for extra in ("empty", "transposed"):
        del found[extra]
    assert_equal(found, STATE)


MOVE = """
import sys
from holdfast.checkpoint.foreign import export_orbax, import_checkpoint
verb = {"import": import_checkpoint, "export": export_orbax}[sys.argv[1]]
import tensorstore

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) << 10

open("/proc/self/clear_refs", "w").write("5")  # forget the peak: a child begins with that of its parent
before = peak()
verb(sys.argv[2], sys.argv[3], step=1, memory_limit=256 << 20)
print(peak() - before)
"""


def test_memory_stays_bounded_for_an_array_beyond_it(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).standard_normal((96 << 10, 1 << 10), np.float32)  # 384 MiB
    with Checkpointer(tmp_path / "ckpt", writer="thread", journal=False) as ckpt:
        ckpt.save(1, {"rows": rows}).durable(timeout_s=120)
    taken = {}
    for verb, source, target in (("export", "ckpt", "orbax"), ("import", "orbax", "back")):
        taken[verb] = int(ran(MOVE, verb, tmp_path / source, tmp_path / target))
    assert_equal(stored(tmp_path / "back", 1), {"rows": rows})
    assert 0 < max(taken.values()) < 288 << 20, taken
