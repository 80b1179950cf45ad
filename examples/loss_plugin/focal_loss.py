"""The focal loss: tokens that the model already gets right weigh less."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loss_hub import TARGETS, WEIGHTS, BatchInputs, LossTerms, loss


@dataclass(frozen=True)
class FocalConfig:
    """What `loss_fn_config` may set. Every key is a float, an int or a str, and has a default."""

    gamma: float = 2.0
    """How fast a token's weight falls with its probability; 0 is cross_entropy."""


@loss("focal", inputs=(TARGETS, WEIGHTS), config=FocalConfig)
def focal(logprobs_N: Tensor, batch: BatchInputs, config: FocalConfig) -> LossTerms:
    """−Σ w·(1 − p)^gamma·lp with p = exp(lp).

    Source: Lin et al. 2017, "Focal Loss for Dense Object Detection", eq. 4. Units: nats; sum over tokens and datums.
    """
    # 1 − p with its digits where p is near 1; a token of probability 1 has a loss and a gradient of 0.
    wrong_N = (-torch.expm1(logprobs_N)).clamp(min=torch.finfo(torch.float32).tiny)
    return LossTerms(per_token=-batch.weights_N * wrong_N**config.gamma * logprobs_N)
