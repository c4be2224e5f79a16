"""Where other nodes' vaults are, and which of them a standing vault keeps copies of, as files say it.

Files and not messages: whoever is started again finds them as they were, and nobody waits.
"""

from __future__ import annotations

from holdfast.errors import VaultError


def named_neighbours(path: str) -> dict[str, str]:
    """The nodes that the lines NODE=ADDRESS of a file name, and where their vaults are; none without a file.

    The addresses are as for `address_in`. Fails: OSError.
    """
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            rows = [line.rstrip("\n").partition("=") for line in file]
    except FileNotFoundError:
        return {}
    return {node: address for node, _, address in rows if node and address}


def address_in(where: str) -> str:
    """An address, or what stands in the file of `file:PATH`. Fails: VaultError."""
    if not where.startswith("file:"):
        return where
    path = where.removeprefix("file:")
    try:
        with open(path, encoding="ascii") as file:
            return file.read(256).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise VaultError(f"no vault's address in {path}: {error}", hint="is that vault running?") from error
