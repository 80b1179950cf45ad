"""From a loss and its logprobs to one differentiable sum and the request's metrics.

Metric keys are `name:reduction` with sum, max or min, so that parts merge exactly. `forward` and
`forward_backward` evaluate the same expression and get the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loss_hub.batch import BatchInputs
from loss_hub.gap import rollout_gap
from loss_hub.registry import Loss
from loss_hub.specs import ADVANTAGES, ROLLOUT_LOGPROBS, WEIGHTS


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A loss evaluated on one microbatch."""

    loss_sum: Tensor
    """float64 scalar, the sum of float32 terms; its gradient reaches the logprobs in float32."""
    metrics: dict[str, float]
    """Of this microbatch alone; `merge` puts microbatches together."""


def evaluate(loss: Loss, logprobs_N: Tensor, batch: BatchInputs, config: Any) -> Evaluation:
    """Evaluate `loss` on `logprobs_N`: float32, nats, shaped like `batch.targets_N`.

    A target that takes no part is selected out, not multiplied away: whatever its logprob is, −inf and NaN
    too, the loss and the gradient stay finite, and its own gradient is exactly 0.
    """
    if logprobs_N.shape != batch.targets_N.shape or logprobs_N.dtype != torch.float32:
        raise ValueError(
            f"logprobs are {logprobs_N.dtype} {tuple(logprobs_N.shape)}; "
            f"must be torch.float32 {tuple(batch.targets_N.shape)}, like the targets"
        )
    part = loss.takes_part(batch)
    # Selected before and after: the first keeps bad values out of the function, and with it out of the
    # derivative, where 0 · inf would be NaN; the second drops terms the function makes of the stand-in 0.
    selected = torch.where(part, logprobs_N, torch.zeros_like(logprobs_N))
    terms = loss.function(selected, batch.only(part), config)
    loss_sum = torch.where(part, terms.per_token, torch.zeros_like(terms.per_token)).double().sum()

    metrics = {
        "loss:sum": loss_sum.detach(),
        "tokens:sum": loss_sum.new_tensor(float(sum(batch.lengths))),
        "loss_tokens:sum": part.reshape(part.shape[0], -1).any(dim=1).sum(dtype=torch.float64),
    }
    if loss.input(WEIGHTS.name):
        metrics["weights:sum"] = batch.weights_N.double().sum()
    if loss.input(ROLLOUT_LOGPROBS.name) and loss.input(ADVANTAGES.name):
        metrics |= rollout_gap(logprobs_N, batch)
    if terms.clipped_N is not None:
        metrics["clipped_tokens:sum"] = (terms.clipped_N & part).sum(dtype=torch.float64)
    values = torch.stack(list(metrics.values())).tolist()  # one transfer from the device
    return Evaluation(loss_sum, dict(zip(metrics, values, strict=True)))


def merge(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of one request from those of its microbatches, in the given order.

    Sums are added left to right as float64; NaN stays NaN. Raises ValueError when there is no part, when
    parts differ in their keys, or for a reduction that does not merge exactly.
    """
    parts = list(parts)
    if not parts:
        raise ValueError("nothing to merge: a request has at least one microbatch")
    merged = dict(parts[0])
    for part in parts[1:]:
        if part.keys() != merged.keys():
            odd = ", ".join(sorted(part.keys() ^ merged.keys()))
            raise ValueError(f"parts of one request differ in their metrics: {odd}")
        merged = {key: _combine(key, value, part[key]) for key, value in merged.items()}
    return merged


def _combine(key: str, left: float, right: float) -> float:
    match key.partition(":")[2]:
        case "sum":
            return left + right
        case "max":
            return math.nan if math.isnan(left) or math.isnan(right) else max(left, right)
        case "min":
            return math.nan if math.isnan(left) or math.isnan(right) else min(left, right)
        case _:
            raise ValueError(f"metric {key!r} does not merge: its reduction must be sum, max or min")
