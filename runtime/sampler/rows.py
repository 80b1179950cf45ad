"""The keys and values of a batch. Rows end at the same column; shorter ones are padded on the left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Layers = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, (rows, heads, columns, size of a head)."""


def empty() -> Any:
    from transformers import DynamicCache

    return DynamicCache()


def layers_of(cache: Any) -> Layers:
    return [(layer.keys, layer.values) for layer in cache.layers]


class Rows:
    """A cache that rows join and leave. `lengths` says how many of a row's last columns are its own."""

    def __init__(self) -> None:
        self.cache: Any = empty()
        self.lengths: list[int] = []

    @property
    def columns(self) -> int:
        return max(self.lengths, default=0)

    def mask(self, more: int) -> Tensor | None:
        """(rows, columns + `more`), 0 where a column is padding; None where none is."""
        columns = self.columns
        if all(length == columns for length in self.lengths):
            return None
        ages = torch.arange(columns + more, 0, -1)
        own = torch.tensor(self.lengths).add(more)
        return (ages[None, :] <= own[:, None]).long()

    def grew(self, by: int) -> None:
        self.lengths = [length + by for length in self.lengths]

    def join(self, prompt: Layers, copies: int) -> None:
        """Add `copies` rows that have all looked at the same prompt: one row's layers."""
        length = prompt[0][0].shape[-2]
        columns = max(self.columns, length)
        joined: Layers = []
        old = layers_of(self.cache) if self.lengths else [(None, None)] * len(prompt)
        for before, new in zip(old, prompt, strict=True):
            joined.append(_stacked(before, new, columns, copies))
        self.lengths += [length] * copies
        self._become(joined)

    def keep(self, rows: Sequence[int]) -> None:
        """The rows that stay, by their places."""
        self.lengths = [self.lengths[row] for row in rows]
        if not rows:
            self.cache = empty()
            return
        at = torch.tensor(rows)
        columns = self.columns
        self._become(
            [
                (k[at, :, -columns:].contiguous(), v[at, :, -columns:].contiguous())
                for k, v in layers_of(self.cache)
            ]
        )

    def _become(self, layers: Layers) -> None:
        self.cache = empty()
        for number, (keys, values) in enumerate(layers):
            self.cache.update(keys, values, number)


def _stacked(
    before: tuple[Any, Any], new: tuple[Tensor, Tensor], columns: int, copies: int
) -> tuple[Tensor, Tensor]:
    both = []
    for old, one in zip(before, new, strict=True):
        parts = [] if old is None else [_padded(old, columns)]
        parts.append(_padded(one, columns).expand(copies, -1, -1, -1))
        both.append(torch.cat(parts))
    return both[0], both[1]


def _padded(tensor: Tensor, columns: int) -> Tensor:
    missing = columns - tensor.shape[-2]
    return torch.nn.functional.pad(tensor, (0, 0, missing, 0)) if missing else tensor
