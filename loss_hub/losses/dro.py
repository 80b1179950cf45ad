"""Direct reward optimization: a policy gradient held to the rollout policy by a squared penalty."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from loss_hub.batch import BatchInputs
from loss_hub.registry import LossTerms, loss
from loss_hub.specs import ADVANTAGES, ROLLOUT_LOGPROBS, TARGETS


@dataclass(frozen=True, slots=True)
class DroConfig:
    beta: float = 0.05
    """Strength of the penalty, per nat. The docs state no default; 0.05 is the value of their example."""


@loss(
    "dro",
    inputs=(TARGETS, ROLLOUT_LOGPROBS, ADVANTAGES),
    config=DroConfig,
    takes_part=BatchInputs.rolled_out_N,
)
def dro(logprobs_N: Tensor, batch: BatchInputs, config: DroConfig) -> LossTerms:
    """−Σ (lp·A − ½·beta·(lp − q)²), over the tokens the sampler wrote.

    Prompt positions travel with advantage 0 and logprob 0. Taken literally they would add ½·beta·lp² and
    train the prompt away, so they take no part; a sampled token with advantage 0 keeps its penalty.
    Source: Tinker docs, "dro"; Richemond et al. 2024. Units: nats; sum over tokens and datums.
    """
    gap_N = logprobs_N - batch.rollout_logprobs_N
    return LossTerms(per_token=-(logprobs_N * batch.advantages_N - 0.5 * config.beta * gap_N.square()))
