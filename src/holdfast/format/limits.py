"""How large anything read from disk may be; each is checked before memory is taken.

The numbers are far above what a real run needs (10,000 writers, 10,000 arrays) and far below what
would hurt the reader. They are part of format version 1: a writer refuses what a reader would.
"""

from __future__ import annotations

MAX_INT = 2**63 - 1
"""Largest size, offset, dimension and step."""

MAX_HEADER = 100_000_000
"""Largest safetensors header in bytes; the safetensors library's own limit."""

MAX_MANIFEST = 256 << 20
"""Largest manifest.json in bytes."""

MAX_INDEX = 256 << 20
"""Largest part index in bytes."""

MAX_PARTS = 1 << 20
"""Part numbers lie below this."""

MAX_FILES = 1 << 12
"""Data files of one part."""

MAX_CELLS = 1 << 22
"""Cells of one array's shard grid. The product of a few short cut lists can be astronomical."""

MAX_DIMS = 64
"""Dimensions of one array; numpy's own limit."""

MAX_META_DEPTH = 64
"""Nesting of the user's metadata."""

MAX_META_INT_BITS = 1024
"""Bits of one integer in the user's metadata; Python refuses to parse very long decimals."""
