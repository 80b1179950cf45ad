"""Reads what `debug.dump_gradients` wrote."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from bus.subjects import escape


def read(folder: Path, model_id: str, step: int, rank: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors by kind (gradient, before, after, exp_avg, exp_avg_sq) and PEFT name."""
    out: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(
        folder / escape(model_id) / f"{step:06d}" / f"rank{rank}.safetensors"
    ).items():
        kind, _, name = key.partition(".")
        out.setdefault(kind, {})[name] = tensor
    return out


def vector(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """All tensors as one flat float64 vector, in order of their names."""
    return torch.cat([tensors[name].double().reshape(-1) for name in sorted(tensors)])


def relative_l2(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
