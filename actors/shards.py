"""Tensors that ranks hold in parts, and how the parts make the whole.

A layout cuts a tensor along one dimension over its tensor-parallel ranks, or not at all; pipeline stages and expert
ranks hold different tensors; data-parallel ranks hold the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a tensor."""

    name: str
    """Under which others know the whole: Hugging Face's, or PEFT's."""
    tensor: Tensor
    split: int | None
    """The dimension that tensor-parallel ranks share out; None where each holds the whole."""
    size: int | None
    """The whole's size in that dimension. The parts together may be longer: padding, at the end."""


def whole(parts: Mapping[int, Shard]) -> Tensor:
    """The whole tensor from its part of every tensor-parallel rank."""
    ordered = [parts[rank] for rank in sorted(parts)]
    first = ordered[0]
    if first.split is None:
        return first.tensor
    assert first.size is not None
    return torch.cat([part.tensor for part in ordered], dim=first.split).narrow(first.split, 0, first.size)


def part(full: Tensor, split: int | None, rank: int, ranks: int) -> Tensor:
    """The inverse of `whole`: the part of one of `ranks` tensor-parallel ranks; those at the end may hold zeros."""
    if split is None or ranks == 1:
        return full
    if missing := -full.shape[split] % ranks:
        shape = list(full.shape)
        shape[split] = missing
        full = torch.cat([full, full.new_zeros(shape)], dim=split)
    return full.chunk(ranks, dim=split)[rank]


def gather(ranks: Iterable[tuple[int, Iterable[Shard]]]) -> dict[str, Tensor]:
    """Whole tensors by name, from (tensor-parallel rank, shards) of ranks that together hold everything.

    Of several ranks that hold the same part, the last one's is taken.
    """
    found: dict[str, dict[int, Shard]] = {}
    for tp_rank, shards in ranks:
        for shard in shards:
            found.setdefault(shard.name, {})[tp_rank] = shard
    return {name: whole(parts) for name, parts in found.items()}
