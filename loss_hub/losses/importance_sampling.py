"""Policy gradient corrected for having sampled from another policy."""

from __future__ import annotations

import torch
from torch import Tensor

from loss_hub.batch import BatchInputs
from loss_hub.config import NoConfig
from loss_hub.registry import LossTerms, loss
from loss_hub.specs import ADVANTAGES, ROLLOUT_LOGPROBS, TARGETS


@loss("importance_sampling", inputs=(TARGETS, ROLLOUT_LOGPROBS, ADVANTAGES))
def importance_sampling(logprobs_N: Tensor, batch: BatchInputs, config: NoConfig) -> LossTerms:
    """−Σ exp(lp − q)·A, the gradient flowing through the ratio; never clipped.

    Source: Tinker docs, "importance_sampling". Units: nats; sum over tokens and datums.
    """
    ratio_N = torch.exp(logprobs_N - batch.rollout_logprobs_N)
    return LossTerms(per_token=-ratio_N * batch.advantages_N)
