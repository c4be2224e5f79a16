"""`python -m holdfast.testing.coordination`: run seeds, in several processes if asked; say which fail."""

from __future__ import annotations

import sys

from holdfast.testing.coordination.simulation import simulate
from holdfast.testing.seeds import Seeds

main = Seeds("holdfast.testing.coordination", simulate).main

if __name__ == "__main__":
    sys.exit(main())
