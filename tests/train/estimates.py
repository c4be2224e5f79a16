"""Compiles the programs of configs, in a process of its own, and prints XLA's figures beside ours.

python -m tests.train.estimates RECIPE SETTING,SETTING... [RECIPE SETTING,...]...

Its own process: XLA's CPU compiler must be told before JAX starts to order operations one after another.
"""

from __future__ import annotations

import sys

import msgspec

from holdfast.recipes import resolve
from holdfast.train import compiler

# LLVM's optimisations change no buffer and no operation that XLA counts.
OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def main(arguments: list[str]) -> None:
    """A line of JSON for each config."""
    compiler.prepare(8)
    for recipe, settings in zip(arguments[::2], arguments[1::2], strict=True):
        config = resolve(recipe, settings.split(";") if settings else ())
        found = compiler.findings(config, options=OPTIONS)
        print(msgspec.json.encode(found).decode(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
