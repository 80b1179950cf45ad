"""From a checked request to microbatches: pure, and a function of (request, configuration) alone.

What else is queued never changes how a request is packed, and microbatches never mix requests. Microbatch k of the
*window*, counted across calls, goes to data-parallel rank k mod DP, so that one call of 8 datums, two of 4 and
eight of 1 accumulate the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loss_hub import CheckedRequest
from loss_hub.registry import Loss

Indices = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PackingConfig:
    """How many datums stand in one microbatch."""

    max_tokens_per_microbatch: int = 4096
    """Padded tokens: datums times the longest of them. A single longer datum still goes alone."""
    max_datums_per_microbatch: int = 0
    """0 sets no limit; 1 makes the bits of a gradient independent of how datums were split over calls."""


def plan(lengths: Sequence[int], config: PackingConfig) -> tuple[Indices, ...]:
    """Datum indices of each microbatch, similar lengths together.

    Microbatches stand in the order of their first datum, and datums inside one in the client's order, so that
    one-datum microbatches follow the request.

    >>> plan([3, 17, 4, 16], PackingConfig(max_tokens_per_microbatch=34))
    ((0, 2), (1, 3))
    """
    microbatches: list[Indices] = []
    current: list[int] = []
    longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        full = len(current) == config.max_datums_per_microbatch > 0
        if current and (full or longest * (len(current) + 1) > config.max_tokens_per_microbatch):
            microbatches.append(tuple(sorted(current)))
            current = []
        if not current:
            longest = lengths[i]
        current.append(i)
    if current:
        microbatches.append(tuple(sorted(current)))
    return tuple(sorted(microbatches))


def share(microbatches: Sequence[Indices], first: int, dp_rank: int, dp_size: int) -> list[int]:
    """Which of a request's microbatches a data-parallel rank runs, when `first` came before in the window."""
    return [k for k in range(len(microbatches)) if (first + k) % dp_size == dp_rank]


@dataclass(frozen=True, slots=True)
class PackedRequest:
    """A request as it travels to the ranks: a few flat arrays, whatever the number of datums."""

    loss: Loss
    config: Any
    lengths: tuple[int, ...]
    ks: tuple[int | None, ...]
    """Targets per position of each datum; None where they are 1-D."""
    tokens: np.ndarray
    """int64, all datums' `model_input` one after the other."""
    inputs: dict[str, np.ndarray]
    """Per loss input the datums' values one after the other, flattened."""
    microbatches: tuple[Indices, ...]
    forward_only: bool

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def pack(
    tokens: Sequence[Tensor], checked: CheckedRequest, config: PackingConfig, *, forward_only: bool
) -> PackedRequest:
    """Flatten a checked request and plan its microbatches. `tokens[i]` is datum i's `model_input`, (N_i,)."""
    return PackedRequest(
        loss=checked.loss,
        config=checked.config,
        lengths=checked.lengths,
        ks=checked.ks,
        tokens=torch.cat(list(tokens)).to(torch.int64).numpy(),
        inputs={
            spec.name: torch.cat([datum[spec.name].reshape(-1) for datum in checked.tensors]).numpy()
            for spec in checked.loss.inputs
        },
        microbatches=plan(checked.lengths, config),
        forward_only=forward_only,
    )
