"""Servers that are wrong on purpose, to show that a gate notices."""

from __future__ import annotations

import os
from pathlib import Path


def environment(file: Path) -> dict[str, str]:
    """Of a service that is wrong as `file` says while it exists, see `sitecustomize` here."""
    return {"PYTHONPATH": _path(), "MUTANT_FILE": str(file)}


def fault_environment(file: Path) -> dict[str, str]:
    """Of a service in which `file` can ask for one process's death at one place, see `faults` here."""
    return {"PYTHONPATH": _path(), "FAULT_FILE": str(file)}


def _path() -> str:
    """This folder first, then what our own processes have."""
    before = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(Path(__file__).parent), *([before] if before else [])])
