"""Executables that are compiled once for all processes and restarts of a run."""

from holdfast.xla.bundle import Bundle
from holdfast.xla.executable import Executable, compiled

__all__ = ["Bundle", "Executable", "compiled"]
