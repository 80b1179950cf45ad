"""Log-probabilities of target tokens from vocabulary-parallel logits.

One softmax statistic per position, whatever the number of targets K at it; the backward pass needs no saved
softmax. With tensor parallelism each rank holds a slice of the vocabulary and three small reductions join them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_T_V: Tensor, targets_T_K: Tensor) -> Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        sharded = group.size() > 1
        logits_T_V = logits_T_V.float()

        peak_T = logits_T_V.amax(dim=-1)
        if sharded:
            dist.all_reduce(peak_T, op=dist.ReduceOp.MAX, group=group)
        total_T = (logits_T_V - peak_T[:, None]).exp_().sum(dim=-1)
        if sharded:
            dist.all_reduce(total_T, group=group)

        first = group.rank() * logits_T_V.shape[-1]
        local_T_K = targets_T_K - first
        here_T_K = (local_T_K >= 0) & (local_T_K < logits_T_V.shape[-1])
        local_T_K = local_T_K.masked_fill(~here_T_K, 0)
        chosen_T_K = logits_T_V.gather(-1, local_T_K)
        if sharded:
            chosen_T_K = chosen_T_K.masked_fill(~here_T_K, 0.0)
            dist.all_reduce(chosen_T_K, group=group)

        ctx.save_for_backward(logits_T_V, peak_T, total_T, local_T_K, here_T_K)
        # Subtracted one after the other: their sum would round off what is left of a large logit.
        return chosen_T_K - peak_T[:, None] - total_T.log()[:, None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad_T_K,) = grads
        logits_T_V, peak_T, total_T, local_T_K, here_T_K = ctx.saved_tensors
        grad_T_V = (logits_T_V - peak_T[:, None]).exp_()
        grad_T_V *= (-grad_T_K.sum(dim=-1) / total_T)[:, None]
        grad_T_V.scatter_add_(-1, local_T_K, grad_T_K.masked_fill(~here_T_K, 0.0))
        # A position that nobody weighs is left out, not multiplied by 0: its logits may be NaN or infinite.
        unweighed_T = (grad_T_K == 0).all(dim=-1)
        grad_T_V.masked_fill_(unweighed_T[:, None], 0.0)
        return grad_T_V, None


def target_logprobs(logits_S_B_V: Tensor, targets_B_S: Tensor) -> Tensor:
    """log softmax(logits) at the targets, in nats, float32.

    Args:
        logits_S_B_V: Megatron's layout, this rank's slice of the vocabulary.
        targets_B_S: token ids of the whole vocabulary, (B, S) or (B, S, K).

    Returns:
        Logprobs shaped like the targets.
    """
    targets_B_S_K = targets_B_S if targets_B_S.dim() == 3 else targets_B_S[..., None]
    targets_S_B_K = targets_B_S_K.transpose(0, 1)
    S, B, K = targets_S_B_K.shape
    flat = _TargetLogprobs.apply(logits_S_B_V.reshape(S * B, -1), targets_S_B_K.reshape(S * B, K))
    return flat.view(S, B, K).transpose(0, 1).reshape(targets_B_S.shape)
