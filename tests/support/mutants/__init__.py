"""Servers that are wrong on purpose, to show that a gate notices."""

from __future__ import annotations

import os
from pathlib import Path


def environment(file: Path) -> dict[str, str]:
    """Of a service that is wrong as `file` says while it exists, see `sitecustomize` here."""
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(Path(__file__).parent), *([before] if before else [])])
    return {"PYTHONPATH": path, "MUTANT_FILE": str(file)}
