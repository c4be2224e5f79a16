# mypy: allow-untyped-calls, no-warn-return-any
"""Weights from a trainer to rollout engines, as RL needs them: 50 versions, other meshes, a death.

    python examples/weight_sync.py

Real processes:
- a trainer, whose weights are cut in 2 along rows, publishes a version after every step and never waits;
- an engine with 4 devices, which wants them cut along columns, and one with a 2×2 mesh, which wants both;
- the second engine is killed with SIGKILL half-way, and a spare takes its place: a process that has imported
  everything and is connected to nobody.
The digest of each version travels with it as a scalar, and every engine compares it with the bytes on its own
devices, version by version. Exit code 1 if anything is not as it should be.
"""

import argparse
import json
import math
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

VERSIONS, KILL_AFTER, STEP_S = 50, 20, 0.08
DEADLINE_S = 60.0  # for every wait; the whole takes about ten seconds
SHAPES = {"embed": (1024, 512), "up": (512, 2048), "down": (2048, 512), "norm": (512,)}


def devices(number: int) -> Any:
    """jax, with so many CPU devices."""
    import jax

    jax.config.update("jax_num_cpu_devices", number)
    return jax


def report(**fields: object) -> None:
    """A line for the process that started this one."""
    print(json.dumps(fields), flush=True)


def digest(weights: dict[str, Any]) -> str:
    """Of all bytes, whatever the mesh."""
    import numpy as np
    import xxhash

    whole = xxhash.xxh3_128()
    for name in sorted(weights):
        whole.update(np.asarray(weights[name]).tobytes())
    return whole.hexdigest()


def train() -> None:
    """The trainer: steps, and publishes after each."""
    jax = devices(2)
    from jax.sharding import NamedSharding, PartitionSpec

    from holdfast.transfer import Endpoint

    mesh = jax.make_mesh((2,), ("fsdp",))
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    weights = {name: jax.device_put(jax.numpy.ones(shape), rows) for name, shape in SHAPES.items()}

    def step(weights: Any, key: Any) -> Any:
        noise = {name: jax.random.normal(key, value.shape) for name, value in weights.items()}
        return jax.tree.map(lambda w, n: w + 0.01 * n, weights, noise)

    # The step may donate what was published before: a version does not change under those who still read it.
    step = jax.jit(step, donate_argnums=0)
    with Endpoint() as endpoint:
        report(saw="address", address=endpoint.address)
        blocked: list[float] = []
        publication = None
        for version in range(1, VERSIONS + 1):
            began = time.monotonic()
            weights = jax.block_until_ready(step(weights, jax.random.key(version)))
            tree = {"weights": weights, "digest": digest(weights)}
            published = time.monotonic()
            publication = endpoint.publish("policy", tree, version)
            blocked.append(time.monotonic() - published)
            if version == 1:
                sys.stdin.readline()  # the engines are there
            else:
                time.sleep(max(0.0, STEP_S - (time.monotonic() - began)))  # the rest of a training step
        sys.stdin.readline()  # all engines are done
        assert publication is not None
        outcomes = sorted(publication.targets().values())
        report(saw="trained", blocked_ms=1e3 * statistics.median(blocked), outcomes=outcomes)


def roll_out(address: str, mesh_shape: tuple[int, ...], spare: bool) -> None:
    """An engine: follows the versions until the last. A spare waits for its turn first."""
    jax = devices(math.prod(mesh_shape))
    from jax.sharding import NamedSharding, PartitionSpec

    from holdfast.errors import VersionGoneError
    from holdfast.transfer import Endpoint

    axes = ("tp",) if len(mesh_shape) == 1 else ("dp", "tp")
    mesh = jax.make_mesh(mesh_shape, axes)

    def wanted(shape: tuple[int, ...]) -> Any:
        spec = (None, "tp") if len(axes) == 1 else axes
        sharding = NamedSharding(mesh, PartitionSpec(*spec[: len(shape)]))
        return jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)

    template = {"weights": {name: wanted(shape) for name, shape in SHAPES.items()}, "digest": ""}
    report(saw="up")
    if spare:
        sys.stdin.readline()
    with Endpoint() as endpoint:
        plan = endpoint.prepare([address], "policy", into=template)
        report(saw="prepared", nbytes=plan.nbytes)
        version = 0
        while version < VERSIONS:
            try:
                # The next one, or the newest to begin with; it is waited for if it is not published yet.
                done = plan.run(version=version + 1 if version else None).result(DEADLINE_S)
            except VersionGoneError:
                done = plan.run().result(DEADLINE_S)  # too slow by several versions: on to the newest
            version = done.version
            same = digest(done.tree["weights"]) == done.tree["digest"]
            over = sorted(set(done.transports.values()))
            made = {"connects": done.connects, "buffers": done.fresh_buffers}
            report(saw="version", version=version, same=same, over=over, **made)


class Process:
    """One of the processes, read line by line."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, __file__, *map(str, arguments)]
        environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
        environment["JAX_PLATFORMS"] = "cpu"
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)
        self.lines: list[dict[str, Any]] = []
        self._pending = b""

    def until(self, saw: str, **fields: object) -> dict[str, Any]:
        """The first line that says so. Fails: TimeoutError; RuntimeError if it ends before."""
        assert self.process.stdout is not None
        ends = time.monotonic() + DEADLINE_S
        while True:
            *whole, self._pending = self._pending.split(b"\n")
            self.lines += map(json.loads, whole)
            for found in self.lines:
                if found["saw"] == saw and all(found[key] == value for key, value in fields.items()):
                    return found
            if not select.select([self.process.stdout], [], [], max(0.0, ends - time.monotonic()))[0]:
                raise TimeoutError(f"no {saw!r} in {DEADLINE_S:g} s")
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                raise RuntimeError(f"a process ended with code {self.process.wait()} before {saw!r}")
            self._pending += data

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def versions(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["saw"] == "version"]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def sync(started: list[Process]) -> bool:
    """Run it all and print the summary; whether everything was right."""
    began = time.monotonic()

    def start(*arguments: object) -> Process:
        started.append(Process(*arguments))
        return started[-1]

    trainer = start("train")
    address = trainer.until("address")["address"]
    print(f"trainer: 2 shards, at {address}", flush=True)
    engines = {"4": start("engine", address, 4), "2×2": start("engine", address, 2, 2)}
    spare = start("spare", address, 2, 2)
    spare.until("up")
    for name, engine in engines.items():
        nbytes = engine.until("prepared")["nbytes"]
        print(f"engine {name}: prepared, {nbytes / 2**20:.1f} MiB per version", flush=True)
    trainer.go_on()

    victim = engines["2×2"]
    victim.until("version", version=KILL_AFTER)
    victim.process.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    print(f"engine 2×2: killed after version {KILL_AFTER}", flush=True)
    spare.go_on()
    engines["2×2 (replaced)"] = spare
    first = spare.until("version")["version"]
    took = time.monotonic() - killed
    print(f"engine 2×2: the spare has version {first}, {1e3 * took:.0f} ms later", flush=True)
    for name in ("4", "2×2 (replaced)"):
        engines[name].until("version", version=VERSIONS)
    trainer.go_on()
    summary = trainer.until("trained")

    print()
    right = summary["outcomes"].count("committed") == 2
    for name, engine in engines.items():
        seen = engine.versions()
        numbers = [line["version"] for line in seen]
        wrong = [line["version"] for line in seen if not line["same"]]
        right = right and bool(seen) and not wrong and numbers == sorted(set(numbers))
        connects, buffers = (sum(line[key] for line in seen) for key in ("connects", "buffers"))
        over = "/".join(sorted({kind for line in seen for kind in line["over"]}))
        verdict = "all bits right" if not wrong else f"WRONG: {wrong}"
        print(
            f"engine {name:15} {len(seen):3} versions ({numbers[0]}..{numbers[-1]}) over {over}, "
            f"{connects} reconnects, {buffers} buffers, {verdict}"
        )
    print(f"trainer: publishing took {summary['blocked_ms']:.2f} ms per version, never waiting for an engine")
    print(f"last version: {', '.join(summary['outcomes'])}")
    print(f"identical: {'yes' if right else 'NO'}; took {time.monotonic() - began:.0f} s")
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("role", nargs="*", help=argparse.SUPPRESS)
    role = parser.parse_args().role
    if role[:1] == ["train"]:
        train()
        return 0
    if role:
        roll_out(role[1], tuple(map(int, role[2:])), spare=role[0] == "spare")
        return 0
    started: list[Process] = []
    try:
        return 0 if sync(started) else 1
    except (TimeoutError, RuntimeError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    finally:
        for process in started:
            process.end()


if __name__ == "__main__":
    sys.exit(main())
