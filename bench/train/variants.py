"""Forms of the step beside each other on the GPU that is here: `python -m bench.train.variants [NAME ...]`.

Each of a few processes compiles every form anew (XLA times kernels while it compiles, and takes others each
time; within a process it remembers what it took, so that products are the same for all forms), then runs them
in turns. A form that fails is told with its error. Prints one JSON object: for each form the median of all
groups of steps, that of each process, the share of the peak, and where the time of one profiled step goes.
`--list` shows the forms, `--processes`, `--groups` and `--budget-s` how long it takes: under six minutes as
it is. NAME may also be settings of the recipe `dense_1b`: `model.attention=xla,model.remat=light`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.train import FASTEST
from bench.train.gpu_step import random_batch
from bench.train.timing import GROUP, PEAK
from holdfast.recipes import dense_1b
from holdfast.train import TrainConfig
from holdfast.train.flops import model_flops
from holdfast.train.step import Steps

_FREE = f"{FASTEST},deterministic=false"

FORMS = {
    "plain": _FREE,
    "deterministic": FASTEST,
    "light": "model.weight_grads=compute,deterministic=false",
    "float32 gradients": "model.remat=none,deterministic=false",
    "loss in chunks": f"{_FREE},model.loss_chunk=512",
    "scanned": "model.weight_grads=compute,model.layers=scanned,deterministic=false",
}
"""Settings of the recipe."""
USUAL = ("plain", "deterministic", "light", "scanned")


# ---- one process


class Bench:
    """The forms of one process, which share a batch, and a state where theirs has the same arrays."""

    def __init__(self, smaller: list[str]) -> None:
        self.smaller = smaller
        self._states: dict[str, Any] = {}
        self._made: dict[str, Any] = {}

    def compiled(self, settings: str) -> Running:
        """A form, ready to run."""
        config = dense_1b().override([*settings.split(","), *self.smaller])
        steps = Steps(config, config.model.build(), config.mesh.build(), config.optimizer.build())
        size = config.batches.size_at(0)
        began = time.perf_counter()
        program = steps.fused.lower(*steps.examples(size)["fused"]).compile()
        memory = program.memory_analysis()
        about = {
            "compile_s": round(time.perf_counter() - began, 1),
            "temporary_gb": round(memory.temp_size_in_bytes / 1e9, 2) if memory else None,
        }
        return Running(self, config, steps, program, about)

    def group(self, running: Running, num_steps: int) -> float:
        """Seconds per step of a few steps. A state that a failure took is made anew."""
        key = running.config.model.layers
        state = self._states.pop(key, None)
        if state is None:
            state = self._new(running)
        rate, decay = np.float32(3e-4), np.float32(0.1)
        began, metrics = time.perf_counter(), {"loss": np.float32("nan")}
        for _ in range(num_steps):
            state, metrics = running.program(state, running.micro, rate, decay)
        float(metrics["loss"])  # waits for the last of them
        passed = (time.perf_counter() - began) / num_steps
        self._states[key] = state
        return passed

    def first(self, running: Running) -> dict[str, float]:
        """Loss and length of the gradient of the first step: nearly the same for all forms."""
        self._states.clear()
        state, metrics = running.program(self._new(running), running.micro, np.float32(3e-4), np.float32(0.1))
        self._states[running.config.model.layers] = state
        return {name: float(metrics[name]) for name in ("loss", "grad_norm")}

    def _new(self, running: Running) -> Any:
        self._states.clear()  # two may not fit
        key = running.config.model.layers
        if key not in self._made:  # compiled once, whatever is forgotten meanwhile
            self._made[key] = running.steps.made.lower(jax.random.key(0)).compile()
        return self._made[key](jax.random.key(0))


class Running:
    """A compiled form and what was measured of it."""

    def __init__(
        self, bench: Bench, config: TrainConfig, steps: Steps, program: Any, about: dict[str, Any]
    ) -> None:
        self.bench, self.config, self.steps, self.program, self.about = bench, config, steps, program, about
        size = config.batches.size_at(0)
        self.micro = steps.put(random_batch(config, size), size)
        self.flops = model_flops(config.model, size, config.seq_len).total
        self.times: list[float] = []

    def group(self) -> None:
        """One more group of steps, after one step that is not counted."""
        self.bench.group(self, 1)
        self.times.append(self.bench.group(self, GROUP))

    def told(self) -> dict[str, Any]:
        """What there is to tell so far."""
        return {"step_s": self.times, "flops": self.flops, **self.about}


def child(names: list[str], groups: int, budget_s: float, smaller: list[str], profiles: bool) -> None:
    """Compile, then run in turns; tells everything known of a form after each of its groups."""
    began = time.perf_counter()
    bench, running = Bench(smaller), dict[str, Running]()
    # Once deterministic attention was asked for, a process has no other.
    for name in sorted(names, key=lambda name: "deterministic=false" not in settings_of(name)):
        # The first always; later ones while there is time to run them too.
        if running and time.perf_counter() - began > 0.7 * budget_s:
            _tell(name, {"error": "not compiled: no time left"})
            continue
        try:
            running[name] = bench.compiled(settings_of(name))
            _progress(f"{name}: {running[name].about}")
            running[name].about["first"] = bench.first(running[name])
        except Exception as error:  # one form that fails must not lose the others
            running.pop(name, None)
            _tell(name, {"error": f"{type(error).__name__}: {error}"[:800]})
    for _ in range(groups):
        for name, one in list(running.items()):
            if one.times and time.perf_counter() - began > budget_s:
                continue
            try:
                one.group()
                _tell(name, one.told())
            except Exception as error:
                del running[name]
                _tell(name, {**one.told(), "error": f"{type(error).__name__}: {error}"[:800]})
    for name, one in running.items() if profiles else ():
        if time.perf_counter() - began > budget_s:
            break
        try:
            one.about["kernels_ms"] = breakdown(one)
            _tell(name, one.told())
        except Exception as error:
            _progress(f"{name}: no profile: {error}")


_KINDS = {
    "attention": ("fmha", "flash", "sdpa", "cudnn"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk"),
}


def breakdown(one: Running, num_steps: int = 2) -> dict[str, Any]:
    """Milliseconds of a step by kind of kernel, and the largest of those that are XLA's."""
    data: Any = getattr(jax.profiler, "ProfileData")  # noqa: B009  newer than the stubs
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            one.bench.group(one, num_steps)
        (path,) = Path(folder).rglob("*.xplane.pb")
        profile = data.from_file(str(path))
    kinds: dict[str, float] = {}
    names: dict[str, float] = {}
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if "Stream" not in line.name:
                continue
            for event in line.events:
                ms = event.duration_ns / 1e6 / num_steps
                low = event.name.lower()
                kind = next((kind for kind, parts in _KINDS.items() if any(p in low for p in parts)), "xla")
                kinds[kind] = kinds.get(kind, 0.0) + ms
                if kind == "xla":
                    base = event.name.rstrip("0123456789_.")
                    names[base] = names.get(base, 0.0) + ms
    most = sorted(names.items(), key=lambda item: -item[1])[:14]
    return {
        **{kind: round(ms, 2) for kind, ms in sorted(kinds.items())},
        "largest": {name: round(ms, 2) for name, ms in most},
    }


def _tell(name: str, what: dict[str, Any]) -> None:
    print(json.dumps({"form": name, **what}), flush=True)


# ---- all of them


def settings_of(name: str) -> str:
    """The settings of a form by its name, or settings themselves."""
    return FORMS.get(name, f"{_FREE},{name}")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start one process after the other, and put together what they told."""
    began = time.perf_counter()
    told: dict[str, list[dict[str, Any]]] = {name: [] for name in args.names}
    notes: list[str] = []
    for number in range(args.processes):
        left = args.budget_s - (time.perf_counter() - began)
        share = left / (args.processes - number)
        command = [sys.executable, "-m", "bench.train.variants", *args.names, "--child"]
        command += ["--groups", str(args.groups), "--budget-s", str(max(20.0, share - 15.0))]
        command += [f"--smaller={one}" for one in args.smaller]
        command += ["--profile"] if number == args.processes - 1 and not args.no_profile else []
        with tempfile.TemporaryFile("w+") as out:
            process = subprocess.Popen(command, stdout=out, text=True)
            try:
                code: int | str = process.wait(timeout=max(60.0, left))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = "out of time"
            out.seek(0)
            lines = [line for line in out.read().splitlines() if line.startswith("{")]
        if code != 0:
            notes.append(f"process {number}: {code}")
        latest = {}
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):  # the last line of one that was ended
                answer = json.loads(line)
                latest[answer.pop("form")] = answer
        for name, answer in latest.items():
            told[name].append(answer)
        _progress(f"process {number}: {json.dumps(latest)}")
    forms = {name: _summary(answers) for name, answers in told.items()}
    first = forms[args.names[0]].get("step_ms")
    for one in forms.values():
        if first and one.get("step_ms"):
            one["faster_than_first"] = round(first / one["step_ms"], 4)
    seconds = round(time.perf_counter() - began, 1)
    return {"forms": forms, "notes": notes, "jax": jax.__version__, "seconds": seconds}


def _summary(answers: list[dict[str, Any]]) -> dict[str, Any]:
    measured = [answer for answer in answers if answer.get("step_s")]
    summary: dict[str, Any] = {}
    if measured:
        medians = [statistics.median(answer["step_s"]) for answer in measured]
        middle = statistics.median(medians)
        summary = {
            "step_ms": round(middle * 1e3, 2),
            "mfu": round(measured[0]["flops"] / middle / PEAK, 4),
            "each_process_ms": [round(one * 1e3, 2) for one in medians],
            "best_ms": round(min(min(answer["step_s"]) for answer in measured) * 1e3, 2),
        }
        for key in ("first", "compile_s", "temporary_gb", "kernels_ms"):
            found = [answer[key] for answer in measured if key in answer]
            if found:
                summary[key] = found if key == "compile_s" else found[-1]
    errors = [answer["error"] for answer in answers if "error" in answer]
    if errors or not answers:
        summary["errors"] = errors or ["nothing was told of it"]
    return summary


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(USUAL), help=f"default: {' '.join(USUAL)}")
    parser.add_argument("--processes", type=int, default=2, help="each compiles everything anew (default 2)")
    parser.add_argument("--groups", type=int, default=5, help="groups of steps of each form (default 5)")
    parser.add_argument("--budget-s", type=float, default=330.0, help="seconds for all (default 330)")
    parser.add_argument("--smaller", action="append", default=[], help="a setting for all forms, to try this")
    parser.add_argument("--no-profile", action="store_true", help="do not say where the time goes")
    parser.add_argument("--list", action="store_true", help="show the forms and end")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.list:
        for name, settings in FORMS.items():
            print(f"{name}: {settings}")
    elif args.child:
        child(args.names, args.groups, args.budget_s, args.smaller, args.profile)
    else:
        print(json.dumps(run(args)), flush=True)


if __name__ == "__main__":
    main()
