"""`python -m holdfast.testing.supervision`: run seeds, in several processes if asked; say which fail."""

from __future__ import annotations

import sys

from holdfast.testing.seeds import Seeds
from holdfast.testing.supervision.simulation import simulate

main = Seeds("holdfast.testing.supervision", simulate).main

if __name__ == "__main__":
    sys.exit(main())
