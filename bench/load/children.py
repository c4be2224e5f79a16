"""Measurements in a process of their own: `python -m bench.load.children NAME FOLDER OPTIONS`.

The number of virtual devices is fixed when JAX starts. Each prints one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import save_file

import holdfast
from bench.checkpoint.probes import BLOCK, read_probe
from bench.load.coldness import resident_share
from bench.machine import forget_files, forget_memory
from bench.report import Refused
from bench.turns import in_turn
from holdfast.train.model.config import ModelConfig
from holdfast.train.model.hub_names import decoder_map

Arrays = dict[str, Any]

_FILES = 2


def config_of(nbytes: int) -> ModelConfig:
    """A Llama of about this size in bfloat16."""
    hidden = 2048 if nbytes > 1 << 28 else 128
    made: dict[str, Any] = {
        "vocab_size": 8 * hidden, "hidden": hidden, "num_heads": 16, "num_kv_heads": 8,
        "mlp_hidden": 4 * hidden, "tied": False, "param_dtype": "bfloat16",
    }  # fmt: skip
    layer = ModelConfig(repeats=1, **made).num_params - ModelConfig(repeats=0, **made).num_params
    rest = ModelConfig(repeats=0, **made).num_params
    return ModelConfig(repeats=max(1, round((nbytes / 2 - rest) / layer)), **made)


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of the repository."""
    from holdfast.checkpoint.hub.mapping import leaf_of

    names = decoder_map(config)
    found: dict[str, tuple[int, ...]] = {}
    for leaf, shape in _flat(config.build().shapes()).items():
        rule = names.rule(leaf)
        assert rule is not None
        woven, problems = leaf_of(rule, tuple(shape.shape), lambda _: None)
        assert woven is not None, problems
        found |= {strand.tensor: strand.shape for strand in woven.strands}
    return found


def _flat(tree: Any) -> Arrays:
    from holdfast.arrays import flatten_tree

    flat = flatten_tree(tree)
    return dict(zip(flat.names(), flat.leaves, strict=True))


def make(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Write the repository."""
    shapes = shapes_of(config_of(options["nbytes"]))
    rng = np.random.default_rng(0)
    names = sorted(shapes)
    total = 0
    index: dict[str, str] = {}
    for at in range(_FILES):
        name = f"model-{at + 1:05d}-of-{_FILES:05d}.safetensors"
        tensors = {
            one: rng.integers(0, 1 << 16, shapes[one], dtype=np.uint16).view(ml_dtypes.bfloat16)
            for one in names[at * len(names) // _FILES : (at + 1) * len(names) // _FILES]
        }
        save_file(tensors, folder / name)
        index |= dict.fromkeys(tensors, name)
        total += sum(one.nbytes for one in tensors.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return {"nbytes": total, "tensors": len(names), "files": _FILES}


class Subjects:
    """The ways to load one repository on the devices of this process."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self._folder = folder
        self._threads = options["threads"]
        self._config = config_of(options["nbytes"])
        self._mesh = Mesh(np.array(jax.devices()), ("x",))
        shapes = shapes_of(self._config)
        self._plain = {
            name: self._described(shape, at) for at, (name, shape) in enumerate(sorted(shapes.items()))
        }
        leaves = _flat(self._config.build().shapes())
        self._mapped = {
            name: self._described(tuple(one.shape), at) for at, (name, one) in enumerate(leaves.items())
        }

    def _described(self, shape: tuple[int, ...], at: int) -> Any:
        """Rows and columns are cut in turn; what does not divide lies whole on every device."""
        spec: list[str | None] = [None] * len(shape)
        dim = 0 if at % 2 else len(shape) - 1
        if shape[dim] % len(jax.devices()) == 0:
            spec[dim] = "x"
        placed = NamedSharding(self._mesh, PartitionSpec(*spec))  # type: ignore[no-untyped-call]
        return jax.ShapeDtypeStruct(shape, ml_dtypes.bfloat16, sharding=placed)  # type: ignore[no-untyped-call]

    def holdfast(self) -> Arrays:
        found: Arrays = holdfast.load_hub(self._folder, self._plain, threads=self._threads)
        return found

    def safetensors(self) -> Arrays:
        found = {}
        for file in sorted(self._folder.glob("*.safetensors")):
            with safe_open(file, framework="numpy") as opened:
                for name in _names(opened):
                    found[name] = jax.device_put(opened.get_tensor(name), self._plain[name].sharding)
        return found

    def holdfast_mapped(self) -> Arrays:
        names = decoder_map(self._config)
        tree = _nested(self._mapped)
        return _flat(holdfast.load_hub(self._folder, tree, names, threads=self._threads))

    def safetensors_mapped(self) -> Arrays:
        """As one would write it: a tensor at a time, reordered by numpy, put on the devices."""
        opened: Arrays = {}
        for file in sorted(self._folder.glob("*.safetensors")):
            one = safe_open(file, framework="numpy")
            opened |= dict.fromkeys(_names(one), one)
        found = {}
        for leaf, want in self._mapped.items():
            rule = decoder_map_rule(self._config, leaf)
            parts = [opened[name].get_tensor(name) for name in rule]
            found[leaf] = jax.device_put(_reordered(leaf, parts, self._config), want.sharding)
        return found


def _names(opened: Any) -> list[str]:
    found: list[str] = opened.keys()
    return found


def decoder_map_rule(config: ModelConfig, leaf: str) -> tuple[str, ...]:
    """The names of the tensors behind a leaf."""
    found = decoder_map(config).rule(leaf)
    assert found is not None
    return found.rule.names


def _reordered(leaf: str, parts: list[Any], config: ModelConfig) -> Any:
    kind, head = leaf.rpartition("/")[2], config.head_size
    if kind == "qkv":
        grouped = [one.reshape(config.kv_heads, -1, head, config.hidden) for one in parts]
        return np.ascontiguousarray(np.concatenate(grouped, axis=1).transpose(3, 0, 1, 2))
    if kind == "out":
        return np.ascontiguousarray(parts[0].T).reshape(config.num_heads, head, config.hidden)
    if kind in ("gate", "up", "down"):
        return np.ascontiguousarray(parts[0].T)
    return parts[0]


def _nested(leaves: Arrays) -> Any:
    from holdfast.arrays import unflatten

    return unflatten(leaves)


def _sequential(folder: Path) -> None:
    """Read all files in order, past the page cache, into one buffer."""
    import mmap

    with mmap.mmap(-1, BLOCK) as buffer:
        for file in sorted(folder.glob("*.safetensors")):
            fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
            at = 0
            while got := os.preadv(fd, [buffer], at):
                at += got
                if got % 512:
                    break
            os.close(fd)


def load(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Rounds of every subject, cold."""
    subjects = Subjects(folder, options)
    ways: dict[str, Callable[[], Any]] = {
        "holdfast": subjects.holdfast,
        "safetensors": subjects.safetensors,
        "holdfast mapped": subjects.holdfast_mapped,
        "safetensors mapped": subjects.safetensors_mapped,
        "disk, 1 thread": lambda: _sequential(folder),
        "disk, 4 threads": lambda: [
            read_probe(file, file.stat().st_size // 4096 * 4096, huge=True)
            for file in sorted(folder.glob("*.safetensors"))
        ],
    }
    seconds: dict[str, list[float]] = {}
    resident = 0.0
    for number in range(options["rounds"] + 1):
        kept: dict[str, Any] = {}
        for name in in_turn(list(ways), number):
            forget_files(folder, gently=True)
            share = max(resident_share(file) for file in folder.glob("*.safetensors"))
            resident = max(resident, share)
            if share > 0.01:
                raise Refused(f"{100 * share:.1f} % of a file stay in the page cache: nothing here is cold")
            forget_memory(3 * options["nbytes"] if options["touch"] else 0)
            cpu, started = time.process_time(), time.perf_counter()
            found = ways[name]()
            jax.block_until_ready(found)  # type: ignore[no-untyped-call]
            spent = time.perf_counter() - started
            if number == 0:
                _compare(kept, name, found)
            else:
                seconds.setdefault(name, []).append(spent)
                if name in ("holdfast", "safetensors"):
                    seconds.setdefault(f"{name} CPU", []).append(time.process_time() - cpu)
            del found
        kept.clear()
        last = ", ".join(f"{name} {values[-1]:.2f} s" for name, values in seconds.items())
        print(
            f"{len(jax.devices())} devices, round {number}: {last or 'equal bits'}",
            file=sys.stderr,
            flush=True,
        )
    return {"seconds": seconds, "resident": resident}


def _compare(kept: dict[str, Any], name: str, found: Any) -> None:
    """Fails: AssertionError unless both loaders gave the same bits under the same names."""
    kind = name.replace("holdfast", "").replace("safetensors", "")
    if name.startswith("disk"):
        return
    if kind not in kept:
        kept[kind] = found
        return
    other = kept.pop(kind)
    assert set(other) == set(found)
    for one, array in found.items():
        ours, theirs = np.asarray(array), np.asarray(other[one])
        if ours.dtype != theirs.dtype or not np.array_equal(ours.view(np.uint16), theirs.view(np.uint16)):
            raise AssertionError(f"{one} came back different")


def _stop(_number: int, _frame: object) -> None:
    raise SystemExit(1)


def main() -> None:
    """Run the measurement named on the command line."""
    signal.signal(signal.SIGTERM, _stop)
    name, folder, options = sys.argv[1:]
    measure = {"make": make, "load": load}[name]
    print(json.dumps(measure(Path(folder), json.loads(options))))


if __name__ == "__main__":
    main()
