"""The file that says whose states a standing vault keeps copies of, as whoever watches the vault wrote it.

A file and not a message: whoever of the two is started again finds it as it was, and nobody waits.
"""

from __future__ import annotations


def named_neighbours(path: str) -> dict[str, str]:
    """The nodes that the lines NODE=ADDRESS of a file name, and where their vaults are; none without a file.

    The addresses are as for `copy_from`. Fails: OSError.
    """
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            rows = [line.rstrip("\n").partition("=") for line in file]
    except FileNotFoundError:
        return {}
    return {node: address for node, _, address in rows if node and address}
