"""Clipped importance-sampling weights: every token keeps its gradient, none weighs too much."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loss_hub.batch import BatchInputs
from loss_hub.config import RatioBounds
from loss_hub.registry import LossTerms, loss
from loss_hub.specs import ADVANTAGES, ROLLOUT_LOGPROBS, TARGETS


@dataclass(frozen=True)
class CispoConfig(RatioBounds):
    """Absolute ratio bounds. One-sided unless asked otherwise: a ratio is never below 0."""

    clip_low_threshold: float = 0.0
    clip_high_threshold: float = 4.0


@loss("cispo", inputs=(TARGETS, ROLLOUT_LOGPROBS, ADVANTAGES), config=CispoConfig)
def cispo(logprobs_N: Tensor, batch: BatchInputs, config: CispoConfig) -> LossTerms:
    """−Σ sg(clamp(r, low, high))·lp·A with r = exp(lp − q): no gradient through the ratio.

    Source: Tinker docs, "cispo" (defaults of the 2026-08 tutorial); MiniMax-M1, eq. 4. Units: nats; sum over
    tokens and datums.
    """
    ratio_N = torch.exp(logprobs_N.detach() - batch.rollout_logprobs_N)
    clamped_N = ratio_N.clamp(config.clip_low_threshold, config.clip_high_threshold)
    return LossTerms(
        per_token=-clamped_N * logprobs_N * batch.advantages_N, clipped_N=config.outside(ratio_N)
    )
