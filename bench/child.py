"""Measurements that need a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_REPO = Path(__file__).resolve().parents[1]
_GRACE_S = 30.0


def run_child(
    module: str,
    name: str,
    folder: Path,
    options: Mapping[str, Any],
    *,
    env: Mapping[str, str],
    timeout_s: float = 1800.0,
) -> dict[str, Any]:
    """Run `python -m MODULE NAME FOLDER OPTIONS` and return the JSON object that it prints.

    A failure here, or Ctrl-C, ends the child in an orderly way, so that it can end its own processes.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", module, name, str(folder), json.dumps(options)],
        stdout=subprocess.PIPE,
        cwd=_REPO,
        env={**os.environ, **env},
    )
    try:
        out, _ = child.communicate(timeout=timeout_s)
    except BaseException:
        child.terminate()
        try:
            child.communicate(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
        raise
    if child.returncode:
        raise RuntimeError(f"the {name} measurement ended with exit code {child.returncode}")
    found: dict[str, Any] = json.loads(out)
    return found
