"""Reads what `debug.dump_gradients` wrote."""

from __future__ import annotations

from pathlib import Path

import torch

from actors import gradient_dump

KINDS = ("gradient", "before", "after", "exp_avg", "exp_avg_sq")


def read(folder: Path, model_id: str, step: int) -> dict[str, dict[str, torch.Tensor]]:
    """Whole tensors by kind (gradient, before, after, exp_avg, exp_avg_sq) and name, of all ranks together."""
    return {kind: gradient_dump.read(folder, model_id, step, kind) for kind in KINDS}


def of_rank(folder: Path, model_id: str, step: int, rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """What one rank holds of them."""
    return {
        kind: {s.name: s.tensor for s in gradient_dump.rank_shards(folder, model_id, step, rank, kind)[1]}
        for kind in KINDS
    }


def vector(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """All tensors as one flat float64 vector, in order of their names."""
    return torch.cat([tensors[name].double().reshape(-1) for name in sorted(tensors)])


def relative_l2(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
