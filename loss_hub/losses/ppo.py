"""Proximal policy optimization: the ratio stops paying outside its bounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loss_hub.batch import BatchInputs
from loss_hub.config import RatioBounds
from loss_hub.registry import LossTerms, loss
from loss_hub.specs import ADVANTAGES, ROLLOUT_LOGPROBS, TARGETS


@dataclass(frozen=True)
class PpoConfig(RatioBounds):
    """Absolute ratio bounds: 0.8 and 1.2, not a distance of 0.2."""

    clip_low_threshold: float = 0.8
    clip_high_threshold: float = 1.2


@loss("ppo", inputs=(TARGETS, ROLLOUT_LOGPROBS, ADVANTAGES), config=PpoConfig)
def ppo(logprobs_N: Tensor, batch: BatchInputs, config: PpoConfig) -> LossTerms:
    """−Σ min(r·A, clamp(r, low, high)·A) with r = exp(lp − q), token by token.

    Pessimistic: a ratio beyond a bound loses its gradient only where the advantage would push it further.
    Source: Tinker docs, "ppo"; Schulman et al. 2017, eq. 7. Units: nats; sum over tokens and datums.
    """
    ratio_N = torch.exp(logprobs_N - batch.rollout_logprobs_N)
    clamped_N = ratio_N.clamp(config.clip_low_threshold, config.clip_high_threshold)
    gain_N = torch.minimum(ratio_N * batch.advantages_N, clamped_N * batch.advantages_N)
    return LossTerms(per_token=-gain_N, clipped_N=config.outside(ratio_N))
