"""The tensors a loss may ask for: name, dtype, shape rule, and what values it accepts.

Shapes: N is the datum's length in tokens, K the number of targets at each position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One entry of `loss_fn_inputs`."""

    name: str
    dtype: torch.dtype
    """What the loss sees: `torch.int64` or `torch.float32`. Integers sent for a float32 input are cast."""
    like_targets: bool = False
    """False: always (N,). True: (N,) or (N, K), the same shape as `target_tokens`."""
    absent: float | None = None
    """The value at every position when the request leaves the input out; None makes it required."""
    finite_where: tuple[str, ...] = ()
    """Names of other inputs: NaN and ±inf are refused where one of them is not 0. Empty: everywhere."""


TARGETS = InputSpec("target_tokens", torch.int64)
"""Token ids, one target a position."""

TOP_K_TARGETS = InputSpec("target_tokens", torch.int64, like_targets=True)
"""Token ids, one or K targets a position."""

WEIGHTS = InputSpec("weights", torch.float32, like_targets=True, absent=1.0)
"""Any real number of either sign, one a target. Left out, every target weighs 1."""

ROLLOUT_LOGPROBS = InputSpec("logprobs", torch.float32, finite_where=("advantages", "sequence_ratio_mask"))
"""q: what the sampler gave the target, in nats. Free where neither an advantage nor a mask asks for it: prompts have
none."""

ADVANTAGES = InputSpec("advantages", torch.float32)
"""A: any real number, one a position; 0 on prompts."""

SEQUENCE_RATIO_MASK = InputSpec("sequence_ratio_mask", torch.float32)
"""Not 0 at the tokens whose log ratio is part of their sequence's mean."""
