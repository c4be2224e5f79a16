"""The `holdfast` command: parse, call, print.

Data goes to stdout, everything else to stderr. Importing this costs `click` and nothing more; each command
brings what it needs when it runs.
"""

from holdfast.cli.program import main

__all__ = ["main"]
