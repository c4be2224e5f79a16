"""A process that exports a tree of three files and reports how far it is."""

from __future__ import annotations

import json
import sys
from typing import Any, Final

import numpy as np

from holdfast.checkpoint import save_hub
from holdfast.storage import StoreOptions

SIZE: Final = 9 << 20
"""Two pieces of an upload."""


def tree() -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.random.default_rng(n).integers(0, 256, SIZE, np.uint8) for n, name in enumerate("abc")}


def save(place: str, **settings: Any) -> None:
    save_hub(place, tree(), shard_bytes=SIZE, files={"config.json": b"{}"}, **settings)


def main() -> None:
    """Export to the place in argv[1]; with "step" in argv[2] wait for a line of input behind each tensor."""

    def report(saw: str) -> None:
        print(json.dumps({"saw": saw}), flush=True)

    def progress(_: int) -> None:
        report("tensor")
        if sys.argv[2:] == ["step"]:
            sys.stdin.readline()

    save(sys.argv[1], progress=progress, options=StoreOptions(hold_s=3.0))
    report("done")


if __name__ == "__main__":
    main()
