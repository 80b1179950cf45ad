"""What the tenants train: fixed steps of fixed data, the same in every run. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

import torch

from loss_hub import DatumInputs
from tests.support.requests import datums

CHUNK = 2
"""Datums of one request of the SDK: longer calls become several, posted side by side."""

AHEAD = 2
"""Steps that a client sends before it waits for the oldest one's results."""

APART = 6
"""Steps that a client may be ahead of the slowest: every tenant is at work whenever something is hit."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One client and its model."""

    name: str
    over: Literal["sdk", "nats"]
    rank: int
    seed: int
    loss: str
    learning_rate: float = 1e-3


TENANTS = (
    Tenant("supervised", "sdk", rank=8, seed=3, loss="cross_entropy"),
    Tenant("sampled", "sdk", rank=4, seed=5, loss="importance_sampling"),
    Tenant("events", "nats", rank=16, seed=7, loss="ppo"),
)


@dataclass(frozen=True, slots=True)
class Step:
    """The calls of one window, as lengths of their datums and a seed of their content."""

    calls: tuple[tuple[int, ...], ...]
    seed: int

    def batch(self, loss: str, call: int) -> tuple[list[torch.Tensor], list[DatumInputs]]:
        return datums(self.calls[call], loss=loss, seed=self.seed + call)

    def requests(self, tenant: Tenant, call: int) -> int:
        """How many numbers of the model's sequence the call takes."""
        return -(-len(self.calls[call]) // CHUNK) if tenant.over == "sdk" else 1


def steps(tenant: Tenant, count: int) -> list[Step]:
    """A tenant's training: windows of one to four calls of one to four datums."""
    chance = random.Random(tenant.name)
    planned = []
    for number in range(count):
        calls = tuple(
            tuple(chance.randint(2, 24) for _ in range(chance.randint(1, 4)))
            for _ in range(chance.randint(1, 4))
        )
        planned.append(Step(calls, seed=1000 * tenant.seed + 10 * number))
    return planned
