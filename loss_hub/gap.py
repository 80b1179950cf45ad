"""The gap between the policy that sampled and the one that trains, from their logprobs of the same tokens.

d = lp − q, in float64, over the tokens the sampler wrote. All as sums and maxima, so that merging
microbatches, ranks and chunks is exact: mean gap is `rollout_gap:sum / rollout_tokens:sum`, effective sample
size `rollout_ratio:sum² / rollout_ratio_sq:sum`, in tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loss_hub.batch import BatchInputs


@torch.no_grad()
def rollout_gap(logprobs_N: Tensor, batch: BatchInputs) -> dict[str, Tensor]:
    """Metrics as float64 scalars. `batch` must hold rollout logprobs and advantages.

    The KL estimators are those of http://joschu.net/blog/kl-approx.html for samples of the rollout policy:
    k1 = −d, k2 = d²/2, k3 = e^d − 1 − d. A token whose own logprob is not finite has no gap: it is counted
    in `rollout_nonfinite_tokens:sum` and left out of the rest.
    """
    lp_N = logprobs_N.double()
    sampled_N = batch.rolled_out_N()
    part_N = sampled_N & torch.isfinite(lp_N)
    d_N = (lp_N - batch.rollout_logprobs_N.double())[part_N]
    ratio_N = torch.exp(d_N)
    return {
        "rollout_tokens:sum": part_N.sum(dtype=torch.float64),
        "rollout_nonfinite_tokens:sum": (sampled_N & ~part_N).sum(dtype=torch.float64),
        "rollout_gap:sum": d_N.sum(),
        "rollout_gap_abs:sum": d_N.abs().sum(),
        "rollout_gap_abs:max": d_N.abs().max() if d_N.numel() else d_N.new_zeros(()),
        "kl_k1:sum": -d_N.sum(),
        "kl_k2:sum": (d_N.square() / 2).sum(),
        "kl_k3:sum": (torch.expm1(d_N) - d_N).sum(),
        "rollout_ratio:sum": ratio_N.sum(),
        "rollout_ratio_sq:sum": ratio_N.square().sum(),
    }
