"""Writing the parts of ten thousand writers: on all cores, because each takes ten milliseconds to make."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from bench.scale.synthetic import Writers, write_part
from holdfast.format import PartEntry


def write_parts(folder: Path, writers: Writers) -> list[PartEntry]:
    """Write all parts below `folder`, everything but the manifest; the entries by rank."""
    place = folder / writers.folder
    place.mkdir(parents=True)
    shares = max(1, min(os.cpu_count() or 1, writers.world // 100))
    children = [_forked(place, writers, share, shares) for share in range(shares)]
    if any(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children):
        raise RuntimeError("a process that writes parts failed; its message is above")
    entries: list[PartEntry] = []
    for share in range(shares):
        path = folder / f"entries-{share}.json"
        entries += msgspec.json.decode(path.read_bytes(), type=list[PartEntry])
        path.unlink()
    return sorted(entries, key=lambda entry: entry.part)


def _forked(place: Path, writers: Writers, share: int, shares: int) -> int:
    """Write every `shares`-th part in a process of its own, which has all of this one's memory for free."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        entries = [write_part(place, writers, rank) for rank in range(share, writers.world, shares)]
        (place.parent / f"entries-{share}.json").write_bytes(msgspec.json.encode(entries))
        code = 0
    finally:
        os._exit(code)
