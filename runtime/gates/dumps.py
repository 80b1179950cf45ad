"""Gradient vectors of our own servers, as `debug.dump_gradients` writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from bus.subjects import escape

Step = tuple[str, int]
"""A model and how many steps it took before."""


class NoDump(Exception):
    """The folder holds nothing of a step that was taken."""


def difference(folder: Path, found: Step, wanted: Step) -> float:
    """Relative L2 of two steps' gradients, the largest of all ranks."""
    ours, theirs = gradients(folder, *found), gradients(folder, *wanted)
    if ours.keys() != theirs.keys():
        raise NoDump(f"ranks {sorted(ours)} dumped one step, ranks {sorted(theirs)} the other")
    return max(_relative_l2(ours[rank], theirs[rank]) for rank in ours)


def gradients(folder: Path, model_id: str, step: int) -> dict[str, np.ndarray]:
    """Per rank, its part of the gradient as one float64 vector."""
    path = folder / escape(model_id) / f"{step:06d}"
    files = sorted(path.glob("rank*.safetensors"))
    if not files:
        raise NoDump(f"{path} holds no gradient: is this the server's debug.dump_gradients?")
    return {file.stem: _vector(file) for file in files}


def _vector(file: Path) -> np.ndarray:
    tensors = load_file(file)
    names = sorted(name for name in tensors if name.startswith("gradient."))
    return np.concatenate([np.empty(0), *(tensors[name].astype(np.float64).ravel() for name in names)])


def _relative_l2(found: np.ndarray, wanted: np.ndarray) -> float:
    error, size = float(np.linalg.norm(found - wanted)), float(np.linalg.norm(wanted))
    return error / size if size > 0 else (0.0 if error == 0 else float("inf"))
