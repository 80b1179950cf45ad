"""What the parts of the demo found out, for the table and the plot."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Training:
    """A supervised training as it went. Losses are nats per trained token."""

    losses: tuple[float, ...]
    """Of each step's own batch, before that step."""
    before: float
    """On held-out examples, untrained."""
    after: float
    """On the same held-out examples, trained."""
    tokens: int
    """Of all the steps; `tokens / seconds` is the throughput."""
    seconds: float
    """From the first step sent to the last result."""


@dataclass(frozen=True, slots=True)
class PolicyStep:
    """One importance_sampling step: means over the sampled tokens, d = lp − q in nats."""

    rollouts: int
    """Which batch of rollouts it trained on, from 0."""
    loss: float
    gap: float
    """Mean |d|."""
    k1: float
    k2: float
    k3: float


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """A few importance_sampling steps."""

    steps: tuple[PolicyStep, ...]
    before: float
    """Probability of what is rewarded, before any step."""
    after: float
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ByHand:
    """One operation written as JSON with nats-py alone."""

    subject: str
    content_type: str
    """Of the result."""
    loss: float
    """Nats per trained token."""
