"""Runs a page of the documentation: its listings, in order, in one fresh process.

`python` listings run in one namespace; a `text` listing right behind one is what it must print. One that
begins with `# name.py` is written to that file as well. The lines of a `console` listing that begin with `$`
must succeed. Other listings are for reading.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

_FILE = re.compile(r"# (\w+\.py)\n")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Listing(NamedTuple):
    kind: str
    text: str
    line: int


def listings(page: Path) -> list[Listing]:
    """The fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [Listing(m[1], m[2], text.count("\n", 0, m.start()) + 2) for m in _FENCE.finditer(text)]


def run(page: Path) -> None:
    """Run every listing; raises, with the line in the page, where one does not do what it says."""
    names: dict[str, Any] = {"__name__": "__page__"}
    found = listings(page)
    for listing, after in zip(found, [*found[1:], Listing("", "", 0)], strict=True):
        if listing.kind == "console":
            for line in listing.text.splitlines():
                if line.startswith("$ "):
                    subprocess.run(["bash", "-c", line[2:]], check=True, timeout=60)
        if listing.kind != "python":
            continue
        if named := _FILE.match(listing.text):
            Path(named[1]).write_text(listing.text, encoding="utf-8")
        printed = io.StringIO()
        source = "\n" * (listing.line - 1) + listing.text  # so that tracebacks have the page's line numbers
        with contextlib.redirect_stdout(printed):
            exec(compile(source, str(page), "exec"), names)
        if after.kind == "text" and printed.getvalue() != after.text:
            raise AssertionError(
                f"{page}:{listing.line} printed\n{printed.getvalue()}instead of\n{after.text}"
            )


if __name__ == "__main__":
    run(Path(sys.argv[1]))
