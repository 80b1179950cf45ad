"""Group sequence policy optimization: one ratio a sequence, which every token of it shares."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loss_hub.batch import BatchInputs
from loss_hub.config import RatioBounds
from loss_hub.registry import LossTerms, loss
from loss_hub.specs import ADVANTAGES, ROLLOUT_LOGPROBS, SEQUENCE_RATIO_MASK, TARGETS


@dataclass(frozen=True)
class GspoConfig(RatioBounds):
    """Absolute ratio bounds. The docs show no defaults; these are 1 − 3e-4 and 1 + 4e-4, those of the paper.

    A mean over a sequence stays much nearer to 1 than the ratio of a token does.
    """

    clip_low_threshold: float = 0.9997
    clip_high_threshold: float = 1.0004


def _takes_part(batch: BatchInputs) -> Tensor:
    """What has a term of its own, and what the sequence's ratio is made of: bool."""
    return batch.advantaged_N() | (batch.sequence_ratio_mask_N != 0)


@loss(
    "gspo",
    inputs=(TARGETS, ROLLOUT_LOGPROBS, ADVANTAGES, SEQUENCE_RATIO_MASK),
    config=GspoConfig,
    takes_part=_takes_part,
)
def gspo(logprobs_N: Tensor, batch: BatchInputs, config: GspoConfig) -> LossTerms:
    """−Σ min(r·A, clamp(r, low, high)·A), r = exp(mean_M(sg(lp) − q) + lp − sg(lp)): GSPO-token.

    The mean is over the tokens of the datum whose `sequence_ratio_mask` is not 0; of a datum that has none it counts
    as 0, which is ratio 1. Each token's derivative is that of its own logprob, times the sequence's ratio.
    Source: Tinker docs, "gspo"; Zheng et al. 2025, sec. 4.3. Units: nats; sum over tokens and datums.
    """
    fixed_N = logprobs_N.detach()
    in_mean_N = batch.sequence_ratio_mask_N != 0
    gap_N = torch.where(in_mean_N, fixed_N.double() - batch.rollout_logprobs_N.double(), 0.0)
    log_ratio_D = batch.sums_D(gap_N) / batch.sums_D(in_mean_N).clamp(min=1)
    ratio_N = torch.exp(batch.spread_N(log_ratio_D).float() + (logprobs_N - fixed_N))
    clamped_N = ratio_N.clamp(config.clip_low_threshold, config.clip_high_threshold)
    gain_N = torch.minimum(ratio_N * batch.advantages_N, clamped_N * batch.advantages_N)
    return LossTerms(per_token=-gain_N, clipped_N=config.outside(ratio_N))
