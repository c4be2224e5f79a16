"""The interleaved rounds: every probe and every subject once per round, saves first, then cold loads."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from bench.checkpoint import probes
from bench.checkpoint.on_jax import on_device
from bench.checkpoint.state import StateSpec, same_bits
from bench.checkpoint.subjects import Holdfast, Loaded, Orbax, Safetensors, Subject, TorchDcp
from bench.machine import discard, forget_files, forget_memory
from bench.report import Series
from bench.turns import in_turn

_READY = 3  # copies of the state that a subject may take in fresh memory
_NEW_FILES = "holdfast, new files,"


class Rounds:
    """Makes the state and the subjects, measures them, and ends them."""

    def __init__(
        self, folder: Path, spec: StateSpec, peers: Mapping[str, bool], *, touch: bool, gently: bool
    ) -> None:
        self._folder = folder
        self._spec = spec
        self._peers = peers
        self._touch = touch
        self._gently = gently
        self._stack = ExitStack()
        self._values: dict[str, list[float]] = {}
        self._unsized: set[str] = {"holdfast load, hash CPU"}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._build(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _build(self, stack: ExitStack) -> None:
        self._state = on_device(self._spec)
        forget_memory(0)
        self._host = {name: np.asarray(array) for name, array in self._state.items()}
        self.nbytes = sum(array.nbytes for array in self._host.values())
        self._memcpy = probes.Memcpy(list(self._host.values()))
        self._probe_file = self._folder / "probe"
        self._subjects: dict[str, Subject] = {}
        self._holdfast = Holdfast(self._folder / "holdfast", self._state, recycle=True)
        self._add(stack, "holdfast", self._holdfast)
        self._add(stack, _NEW_FILES, Holdfast(self._folder / "new-files", self._state, recycle=False))
        if self._peers.get("orbax"):
            self._add(stack, "orbax", Orbax(self._folder / "orbax", self._state))
        if self._peers.get("dcp"):
            self._add(stack, "dcp", TorchDcp(self._folder / "dcp", self._state))
        if self._peers.get("safetensors"):
            path = self._folder / "one.safetensors"
            self._add(stack, "safetensors", Safetensors(path, self._state))
            self._to_jax = Safetensors(path, self._state, to_jax=True)

    def _add(self, stack: ExitStack, name: str, subject: Subject) -> None:
        stack.callback(subject.close)
        self._subjects[name] = subject

    def run(self, rounds: int, progress: Callable[[str], None]) -> None:
        """Warm up and check every loader, then measure."""
        self._round(0, check=True)
        progress("warmed up; every loader gives the saved bits")
        self._values.clear()
        for number in range(1, rounds + 1):
            self._round(number, check=False)
            last = {name: values[-1] for name, values in self._values.items()}
            shown = ("probe write", "holdfast save, durable", "probe read", "holdfast load")
            progress(f"round {number}/{rounds}: " + "  ".join(f"{n} {last[n]:.2f} s" for n in shown))

    def raw(self) -> dict[str, Series]:
        """Everything that was measured, by name."""
        return {
            name: Series(tuple(values), nbytes=0 if name in self._unsized else self.nbytes)
            for name, values in self._values.items()
        }

    def _note(self, name: str, seconds: float) -> None:
        self._values.setdefault(name, []).append(seconds)

    def _round(self, number: int, *, check: bool) -> None:
        saves: list[Callable[[], None]] = [self._copy_and_write]
        saves += [lambda n=name: self._save(n) for name in self._subjects]  # type: ignore[misc]
        for save in in_turn(saves, number):
            os.sync()
            forget_memory(_READY * self.nbytes if self._touch else 0)
            save()
        loads: list[Callable[[], None]] = [
            lambda: self._read(huge=False),
            lambda: self._read(huge=True),
        ]
        loads += [
            lambda n=name, s=subject: self._load(n, s, check=check)  # type: ignore[misc]
            for name, subject in self._subjects.items()
            if name != _NEW_FILES
        ]
        if "safetensors" in self._subjects:
            loads.append(lambda: self._load("safetensors to jax", self._to_jax, check=check))
        for load in in_turn(loads, number):
            forget_files(self._folder, gently=self._gently)
            forget_memory(_READY * self.nbytes if self._touch else 0)
            load()
        for subject in self._subjects.values():
            subject.discard()
        discard(self._probe_file)

    def _copy_and_write(self) -> None:
        self._note("memcpy", self._memcpy.seconds())
        size = probes.rounded(self.nbytes)
        self._note("probe write", probes.write_probe(self._probe_file, self._memcpy.random_data, size))

    def _save(self, name: str) -> None:
        blocked, durable = self._subjects[name].save()
        self._note(f"{name} save, blocked", blocked)
        self._note(f"{name} save, durable", durable)

    def _read(self, *, huge: bool) -> None:
        seconds = probes.read_probe(self._probe_file, probes.rounded(self.nbytes), huge=huge)
        self._note("probe read, huge pages" if huge else "probe read", seconds)

    def _load(self, name: str, subject: Subject, *, check: bool) -> None:
        seconds, look = subject.load()
        self._note(f"{name} load", seconds)
        if name == "holdfast":
            self._note("holdfast load, hash CPU", self._holdfast.hash_s)
        if check:
            self._compare(name, look())

    def _compare(self, name: str, loaded: Loaded) -> None:
        for array, saved in self._host.items():
            if not same_bits(saved, loaded[array]):
                raise AssertionError(f"{name}: {array} came back different")
