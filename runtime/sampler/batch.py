"""Sequences that go on together, one token a step. They come and go between steps."""

from __future__ import annotations

import torch

from runtime.sampler.network import Network
from runtime.sampler.rows import Layers, Rows
from runtime.sampler.sequence import Asked, Sequence


class Batch:
    """Over one network; rows may have adapters of their own.

    The last bits of a row's numbers depend on how many rows a matrix has. A `fixed` batch therefore keeps its size:
    what has ended goes on as padding until all have.
    """

    def __init__(self, network: Network, *, fixed: bool) -> None:
        self._network = network
        self._fixed = fixed
        self._rows = Rows()
        self._sequences: list[Sequence] = []

    @property
    def size(self) -> int:
        return len(self._sequences)

    def requests(self) -> set[Asked]:
        return {sequence.asked for sequence in self._sequences}

    def join(self, layers: Layers, sequences: list[Sequence]) -> None:
        """Sequences that have looked at one prompt, and have drawn their first token."""
        going_on = sequences if self._fixed else [s for s in sequences if s.stop_reason is None]
        if any(s.stop_reason is None for s in going_on):
            self._rows.join(layers, len(going_on))
            self._sequences += going_on

    def step(self) -> set[Asked]:
        """Draw the next token of each; the requests that may have come to their end by it."""
        lengths = self._rows.lengths
        ids = torch.tensor([[sequence.tokens[-1]] for sequence in self._sequences])
        self._network.route([sequence.asked.served.adapter for sequence in self._sequences])
        hidden = self._network.hidden(
            ids, torch.tensor(lengths)[:, None], self._rows.mask(1), self._rows.cache
        )
        self._rows.grew(1)
        logits_B_V = self._network.logits(hidden[:, -1])
        ended: set[Asked] = set()
        for sequence, logits_V in zip(self._sequences, logits_B_V, strict=True):
            if sequence.stop_reason is None:
                sequence.take(logits_V)
                if sequence.stop_reason is not None:
                    ended.add(sequence.asked)
        if ended:
            self._drop_ended()
        return ended

    def drop(self, asked: Asked) -> None:
        """The sequences of a request that is wanted no more."""
        self._keep([row for row, sequence in enumerate(self._sequences) if sequence.asked is not asked])

    def _drop_ended(self) -> None:
        going_on = [row for row, sequence in enumerate(self._sequences) if sequence.stop_reason is None]
        if not self._fixed or not going_on:
            self._keep(going_on)

    def _keep(self, rows: list[int]) -> None:
        if len(rows) < self.size:
            self._sequences = [self._sequences[row] for row in rows]
            self._rows.keep(rows)
