"""What a run came to, from its journal alone."""

from holdfast.report.goodput import Goodput, goodput

__all__ = ["Goodput", "goodput"]
