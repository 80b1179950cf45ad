"""Log-probabilities of target tokens, from vocabulary-parallel logits or straight from the hidden states.

One softmax statistic per position, whatever the number of targets K at it; the backward pass needs no saved
softmax. With tensor parallelism each rank holds a slice of the vocabulary and three small reductions join them.
Rows that pad the vocabulary are cut off before anything is computed, so whatever they hold changes nothing. A
position whose targets nobody weighs has no gradient, and gives none to the weights, whatever its logits are.

`target_logprobs` takes logits; `fused_target_logprobs` makes them itself, a chunk of tokens at a time, in the
forward pass and again in the backward pass, and never holds them whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

CHUNK_LOGITS = 2**24
"""Logits that `fused_target_logprobs` holds at a time unless told otherwise: 64 MiB of float32."""


def _real_columns(columns: int, vocab_size: int | None) -> int:
    """How many of this rank's columns stand for tokens. The rest pads the vocabulary and comes last."""
    if vocab_size is None:
        return columns
    group = parallel_state.get_tensor_model_parallel_group()
    if not 0 < vocab_size <= columns * group.size():
        raise ValueError(
            f"vocab_size is {vocab_size}; the head has {columns * group.size()} rows ({columns} on each of "
            f"{group.size()} tensor-parallel ranks), so it must be between 1 and that"
        )
    return min(max(vocab_size - group.rank() * columns, 0), columns)


def _located(targets_T_K: Tensor, columns: int, real: int) -> tuple[Tensor, Tensor]:
    """(column in this rank's slice, whether it is here); the column of a target elsewhere is 0."""
    local_T_K = targets_T_K - parallel_state.get_tensor_model_parallel_group().rank() * columns
    here_T_K = (local_T_K >= 0) & (local_T_K < real)
    return local_T_K.masked_fill(~here_T_K, 0), here_T_K


def _peak(logits_T_V: Tensor) -> Tensor:
    """The largest logit of each position; −inf on a rank whose whole slice is padding."""
    if logits_T_V.shape[-1] == 0:
        return logits_T_V.new_full(logits_T_V.shape[:1], -torch.inf)
    return logits_T_V.amax(dim=-1)


def _chosen(logits_T_V: Tensor, local_T_K: Tensor, here_T_K: Tensor) -> Tensor:
    """The targets' logits, 0 for targets of other ranks."""
    if logits_T_V.shape[-1] == 0:
        return logits_T_V.new_zeros(local_T_K.shape)
    return logits_T_V.gather(-1, local_T_K).masked_fill(~here_T_K, 0.0)


def _gradient(
    shifted_T_V: Tensor, total_T: Tensor, grad_T_K: Tensor, local_T_K: Tensor, here_T_K: Tensor
) -> Tensor:
    """Σₖ gₖ (1[v = tₖ] − softmax(v)) for this rank's v, written over `shifted` (logits − peak)."""
    grad_T_V = shifted_T_V.exp_()
    grad_T_V *= (-grad_T_K.sum(dim=-1) / total_T)[:, None]
    if grad_T_V.shape[-1] > 0:
        grad_T_V.scatter_add_(-1, local_T_K, grad_T_K.masked_fill(~here_T_K, 0.0))
    return grad_T_V


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_T_V: Tensor, targets_T_K: Tensor, vocab_size: int | None) -> Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        sharded = group.size() > 1
        ctx.columns = logits_T_V.shape[-1]
        real = _real_columns(ctx.columns, vocab_size)
        logits_T_V = logits_T_V[:, :real].float()

        peak_T = _peak(logits_T_V)
        if sharded:
            dist.all_reduce(peak_T, op=dist.ReduceOp.MAX, group=group)
        total_T = (logits_T_V - peak_T[:, None]).exp_().sum(dim=-1)
        if sharded:
            dist.all_reduce(total_T, group=group)

        local_T_K, here_T_K = _located(targets_T_K, ctx.columns, real)
        chosen_T_K = _chosen(logits_T_V, local_T_K, here_T_K)
        if sharded:
            dist.all_reduce(chosen_T_K, group=group)

        ctx.save_for_backward(logits_T_V, peak_T, total_T, local_T_K, here_T_K)
        # Subtracted one after the other: their sum would round off what is left of a large logit.
        return chosen_T_K - peak_T[:, None] - total_T.log()[:, None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad_T_K,) = grads
        logits_T_V, peak_T, total_T, local_T_K, here_T_K = ctx.saved_tensors
        grad_T_V = _gradient(logits_T_V - peak_T[:, None], total_T, grad_T_K, local_T_K, here_T_K)
        # A position that nobody weighs is left out, not multiplied by 0: its logits may be NaN or infinite.
        unweighed_T = (grad_T_K == 0).all(dim=-1)
        grad_T_V.masked_fill_(unweighed_T[:, None], 0.0)
        if padding := ctx.columns - grad_T_V.shape[-1]:
            grad_T_V = torch.nn.functional.pad(grad_T_V, (0, padding))
        return grad_T_V, None, None


def target_logprobs(logits_S_B_V: Tensor, targets_B_S: Tensor, vocab_size: int | None = None) -> Tensor:
    """log softmax(logits) at the targets, in nats, float32.

    Args:
        logits_S_B_V: Megatron's layout, this rank's slice of the vocabulary.
        targets_B_S: token ids of the whole vocabulary, (B, S) or (B, S, K).
        vocab_size: tokens in the whole vocabulary; columns from there on are padding. None: nothing is padded.

    Returns:
        Logprobs shaped like the targets. Their gradient with respect to a padded column is 0.
    """
    targets_T_K = _flat(targets_B_S)
    logits_T_V = logits_S_B_V.reshape(targets_T_K.shape[0], -1)
    return _shaped(_TargetLogprobs.apply(logits_T_V, targets_T_K, vocab_size), targets_B_S)


class _FusedTargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_T_H: Tensor,
        weight_V_H: Tensor,
        u_T_R: Tensor | None,
        B_V_R: Tensor | None,
        scale: float,
        targets_T_K: Tensor,
        vocab_size: int | None,
        chunk: int,
    ) -> Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        real = _real_columns(weight_V_H.shape[0], vocab_size)
        local_T_K, here_T_K = _located(targets_T_K, weight_V_H.shape[0], real)
        peak_T = hidden_T_H.new_empty(hidden_T_H.shape[0], dtype=torch.float32)
        total_T = torch.empty_like(peak_T)
        chosen_T_K = torch.empty_like(targets_T_K, dtype=torch.float32)
        for start in range(0, hidden_T_H.shape[0], chunk):
            here = slice(start, start + chunk)
            logits_C_V = _logits(hidden_T_H, weight_V_H, u_T_R, B_V_R, scale, here, real)
            peak_T[here] = _peak(logits_C_V)
            chosen_T_K[here] = _chosen(logits_C_V, local_T_K[here], here_T_K[here])
            total_T[here] = logits_C_V.sub_(peak_T[here, None]).exp_().sum(dim=-1)
        if group.size() > 1:
            local_peak_T = peak_T.clone()
            dist.all_reduce(peak_T, op=dist.ReduceOp.MAX, group=group)
            # A rank that rules all of its tokens out has summed exp(−inf + inf).
            total_T.mul_((local_peak_T - peak_T).exp_()).masked_fill_(local_peak_T == -torch.inf, 0.0)
            dist.all_reduce(total_T, group=group)
            dist.all_reduce(chosen_T_K, group=group)

        ctx.save_for_backward(hidden_T_H, weight_V_H, u_T_R, B_V_R, peak_T, total_T, local_T_K, here_T_K)
        ctx.scale, ctx.real, ctx.chunk = scale, real, chunk
        # Subtracted one after the other: their sum would round off what is left of a large logit.
        return chosen_T_K - peak_T[:, None] - total_T.log()[:, None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_T_K,) = grads
        hidden_T_H, weight_V_H, u_T_R, B_V_R, peak_T, total_T, local_T_K, here_T_K = ctx.saved_tensors
        real, scale = ctx.real, ctx.scale
        hidden_needs, weight_needs, u_needs, B_needs, *_ = ctx.needs_input_grad
        # A token's gradient is written once; a vocabulary row's is a sum over chunks, kept in float32.
        grad_T_H = torch.zeros_like(hidden_T_H) if hidden_needs else None
        grad_V_H = torch.zeros_like(weight_V_H, dtype=torch.float32) if weight_needs else None
        grad_T_R = torch.zeros_like(u_T_R) if u_needs else None
        grad_V_R = torch.zeros_like(B_V_R, dtype=torch.float32) if B_needs else None
        # A position that nobody weighs is left out, not multiplied by 0: it may hold NaN or infinity.
        weighed = (grad_T_K != 0).any(dim=-1).nonzero().squeeze(-1)
        for rows in weighed.split(ctx.chunk):
            shifted_C_V = _logits(hidden_T_H, weight_V_H, u_T_R, B_V_R, scale, rows, real)
            shifted_C_V.sub_(peak_T[rows, None])
            grad_C_V = _gradient(shifted_C_V, total_T[rows], grad_T_K[rows], local_T_K[rows], here_T_K[rows])
            if grad_T_H is not None:
                grad_T_H[rows] = grad_C_V.to(weight_V_H.dtype) @ weight_V_H[:real]
            if grad_V_H is not None:
                _add_product(grad_V_H[:real], grad_C_V, hidden_T_H[rows], 1.0)
            if grad_T_R is not None:
                grad_T_R[rows] = scale * (grad_C_V.to(B_V_R.dtype) @ B_V_R[:real])
            if grad_V_R is not None:
                _add_product(grad_V_R[:real], grad_C_V, u_T_R[rows], scale)
        return grad_T_H, grad_V_H, grad_T_R, grad_V_R, None, None, None, None


def _logits(
    hidden_T_H: Tensor,
    weight_V_H: Tensor,
    u_T_R: Tensor | None,
    B_V_R: Tensor | None,
    scale: float,
    chosen: slice | Tensor,
    real: int,
) -> Tensor:
    """This rank's logits of the chosen tokens, float32, in memory of their own; padding is left out."""
    logits_C_V = hidden_T_H[chosen] @ weight_V_H[:real].t()
    if u_T_R is not None and B_V_R is not None:
        logits_C_V = logits_C_V.to(B_V_R.dtype).addmm_(u_T_R[chosen], B_V_R[:real].t(), alpha=scale)
    return logits_C_V.float()


def _add_product(total_V_X: Tensor, grad_C_V: Tensor, x_C_X: Tensor, scale: float) -> None:
    """total += scale · gradᵀ x, the product in x's precision and the sum in float32."""
    if x_C_X.dtype == total_V_X.dtype:
        total_V_X.addmm_(grad_C_V.t(), x_C_X, alpha=scale)
    else:
        total_V_X.add_(grad_C_V.to(x_C_X.dtype).t() @ x_C_X, alpha=scale)


def fused_target_logprobs(
    hidden_S_B_H: Tensor,
    weight_V_H: Tensor,
    targets_B_S: Tensor,
    *,
    adapter: tuple[Tensor, Tensor, float] | None = None,
    vocab_size: int | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """log softmax(hidden · weightᵀ) at the targets, in nats, float32, the logits never whole in memory.

    With tensor parallelism `hidden` and the adapter's `u` are whole and equal on every rank, and the gradients
    with respect to them are this rank's share alone, the part that goes through its slice of the vocabulary. The
    caller sums the shares: `copy_to_tensor_model_parallel_region` around each does, and so does the gather of a
    sequence-parallel hidden state.

    Args:
        hidden_S_B_H: what the LM head takes, in Megatron's layout.
        weight_V_H: this rank's rows of the LM head. Its gradient is computed only where it requires one.
        targets_B_S: token ids of the whole vocabulary, (B, S) or (B, S, K).
        adapter: a LoRA adapter of the head, (u, B, scale): logits += scale · u Bᵀ, with u = A(hidden) as
            (S · B, rank) in the order of the flattened hidden states and B this rank's rows, of u's dtype.
        vocab_size: tokens in the whole vocabulary; rows from there on are padding. None: nothing is padded.
        chunk_tokens: tokens whose logits exist at a time; by default as many as make `CHUNK_LOGITS` logits. The
            last bits depend on it.

    Returns:
        Logprobs shaped like the targets, with the same bits whether or not gradients are recorded. Their gradient
        with respect to a padded row is 0.
    """
    if chunk_tokens is None:
        chunk_tokens = max(1, CHUNK_LOGITS // weight_V_H.shape[0])
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be at least 1")
    u_T_R, B_V_R, scale = adapter if adapter is not None else (None, None, 0.0)
    targets_T_K = _flat(targets_B_S)
    hidden_T_H = hidden_S_B_H.reshape(targets_T_K.shape[0], -1)
    logprobs_T_K = _FusedTargetLogprobs.apply(
        hidden_T_H, weight_V_H, u_T_R, B_V_R, scale, targets_T_K, vocab_size, chunk_tokens
    )
    return _shaped(logprobs_T_K, targets_B_S)


def _flat(targets_B_S: Tensor) -> Tensor:
    """Targets (B, S) or (B, S, K) as (S · B, K), in the order of Megatron's layout."""
    targets_B_S_K = targets_B_S if targets_B_S.dim() == 3 else targets_B_S[..., None]
    return targets_B_S_K.transpose(0, 1).flatten(0, 1)


def _shaped(logprobs_T_K: Tensor, targets_B_S: Tensor) -> Tensor:
    """The inverse of `_flat`, for what belongs to the targets."""
    B, S = targets_B_S.shape[:2]
    return logprobs_T_K.view(S, B, logprobs_T_K.shape[-1]).transpose(0, 1).reshape(targets_B_S.shape)
