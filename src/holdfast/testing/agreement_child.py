"""The process of one member in the conformance tests: FACTORY PLACE RANK WORLD.

Run as a file, not as a module of the package, so that it starts in a moment.
"""

from __future__ import annotations

import importlib
import json
import sys

from holdfast.coord import Agreement
from holdfast.errors import MissingRanksError


def _serve(agreement: Agreement) -> None:
    for line in sys.stdin:
        name, *args = json.loads(line)
        if name in ("vote", "decide"):
            args[1] = args[1].encode()
        try:
            answer = getattr(agreement, name)(*args)
        except MissingRanksError as error:
            answer = {"missing": sorted(error.ranks)}
        if isinstance(answer, bytes):
            answer = answer.decode()
        elif name == "ballots" and "missing" not in answer:
            answer = {str(rank): ballot.decode() for rank, ballot in answer.items()}
        print(json.dumps(answer), flush=True)


def main() -> None:
    """Serve one member: FACTORY PLACE RANK WORLD."""
    factory, place, rank, world = sys.argv[1:]
    module, _, function = factory.partition(":")
    _serve(getattr(importlib.import_module(module), function)(place, int(rank), int(world)))


if __name__ == "__main__":
    main()
