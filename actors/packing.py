"""From a checked request to microbatches: pure, and a function of (request, configuration) alone.

What else is queued never changes how a request is packed, and microbatches never mix requests. Microbatch k of the
*window*, counted across calls, goes to data-parallel rank k mod DP, so that one call of 8 datums, two of 4 and
eight of 1 accumulate the same bits.

Ranks whose experts serve each other run their microbatches in lockstep, with equal shapes; where one of them has
none it runs padding, which has no loss and adds exact zeros.
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
    one_datum_microbatches: bool = False
    """By configuration: then bits do not depend on how datums were split over calls."""

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
        one_datum_microbatches=config.max_datums_per_microbatch == 1,
    )


@dataclass(frozen=True, slots=True)
class Slot:
    """What a rank runs at one moment of a pass: a microbatch of (rows, columns) tokens, or padding of that shape."""

    rows: int
    columns: int
    request: int = 0
    """Number of the request in the pass."""
    index: int | None = None
    """Number of the microbatch in the request; None for padding."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the layout asks of a pass."""

    dp: int = 1
    lockstep: int = 1
    """Neighbouring data-parallel ranks that run together."""
    multiple: int = 1
    """Slots come in multiples of this: interleaved pipeline stages take turns in rounds."""
    columns_multiple: int = 1
    """Sequences are padded to a multiple of this: tensor-parallel ranks share them out."""
    one_at_a_time: bool = False
    """Of the ranks in lockstep only one has a microbatch at a time. Then the bits of an expert's gradient, which
    sums over what all of them run together, do not depend on how datums were split over calls."""


def slots(
    requests: Sequence[PackedRequest], firsts: Sequence[int], dp_rank: int, schedule: Schedule
) -> list[Slot]:
    """What data-parallel rank `dp_rank` runs in a pass over `requests`.

    `firsts[i]`: microbatches that came before request i in its window. The result has as many slots, of the same
    shapes, on every rank of a lockstep group.
    """
    dp, lockstep = schedule.dp, schedule.lockstep
    mine: list[Slot] = []
    together: dict[int, Slot] = {}
    """The round under way, by data-parallel rank."""
    current: tuple[int, int] | None = None

    def flush() -> None:
        if not together:
            return
        rows = max(slot.rows for slot in together.values())
        columns = max(slot.columns for slot in together.values())
        own = together.get(dp_rank)
        if own is None:
            mine.append(Slot(rows, columns))
        else:
            mine.append(Slot(rows, columns, own.request, own.index))
        together.clear()

    for number, (request, first) in enumerate(zip(requests, firsts, strict=True)):
        for index, datums in enumerate(request.microbatches):
            position = first + index
            rank = position % dp
            if rank // lockstep != dp_rank // lockstep:
                continue
            # Rounds do not mix requests either: what stands together in one decides its shape.
            if schedule.one_at_a_time or (number, position // dp) != current:
                flush()
            current = (number, position // dp)
            longest = max(request.lengths[i] for i in datums)
            columns = -(-longest // schedule.columns_multiple) * schedule.columns_multiple
            together[rank] = Slot(len(datums), columns, number, index)
    flush()
    while len(mine) % schedule.multiple:
        mine.append(Slot(1, schedule.columns_multiple))
    return mine
