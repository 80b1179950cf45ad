"""Supervised learning, and the surrogate of every loss that a client differentiates itself."""

from __future__ import annotations

from torch import Tensor

from loss_hub.batch import BatchInputs
from loss_hub.config import NoConfig
from loss_hub.registry import LossTerms, loss
from loss_hub.specs import TOP_K_TARGETS, WEIGHTS


@loss("cross_entropy", inputs=(TOP_K_TARGETS, WEIGHTS))
def cross_entropy(logprobs: Tensor, batch: BatchInputs, config: NoConfig) -> LossTerms:
    """−Σ w·lp; with K targets a position −Σ_t Σ_k w_tk·lp_tk.

    Weights are any real number and default to 1. `forward_backward_custom` sends −dC/dlp as weights.
    Source: Tinker docs, "cross_entropy". Units: nats; sum over tokens and datums.
    """
    return LossTerms(per_token=-batch.weights_N * logprobs)
