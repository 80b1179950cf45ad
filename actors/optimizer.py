"""AdamW with hyperparameters per call, and the veto of non-finite gradients.

Semantics are torch.optim.AdamW's (decoupled decay on every parameter, global-norm clipping before the step), with
Megatron's optimizer holding the state, sharded over data-parallel ranks where the layout says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from torch import Tensor

from bus.events import AdamParams

CLIP_EPSILON = 1e-6
"""Added to the norm by torch.nn.utils.clip_grad_norm_, so by us."""


def build(ddp: DistributedDataParallel, *, distributed: bool) -> MegatronOptimizer:
    """The optimizer of one tenant's parameters, in float32."""
    config = OptimizerConfig(
        optimizer="adam",
        decoupled_weight_decay=True,
        lr=0.0,
        weight_decay=0.0,
        clip_grad=0.0,
        params_dtype=torch.float32,
        use_distributed_optimizer=distributed,
        log_num_zeros_in_grad=False,
    )
    return get_megatron_optimizer(config, [ddp], use_gloo_process_groups=False)


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def parameters(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """What the optimizer steps on this rank: parameters, or this rank's shards of them."""
    for part in _parts(optimizer):
        yield from part.get_parameters()


@torch.no_grad()
def gradient_norm(optimizer: MegatronOptimizer) -> float:
    """Global L2 norm of the finalized gradient, accumulated in float64, equal on every rank.

    Call after `prepare_grads`. Parameters replicated over tensor-parallel ranks count once.
    """
    total = 0.0
    for part in _parts(optimizer):
        squares = torch.zeros(1, dtype=torch.float64, device="cuda")
        for parameter in part.get_parameters():
            if parameter.grad is not None and param_is_not_tensor_parallel_duplicate(parameter):
                squares += parameter.grad.double().pow(2).sum()
        dist.all_reduce(squares, group=part.get_grad_stats_parallel_group())
        total += squares.item()
    return math.sqrt(total) if math.isfinite(total) else total


@torch.no_grad()
def step(optimizer: MegatronOptimizer, adam: AdamParams, norm: float) -> None:
    """One AdamW step with `adam` on prepared gradients of finite norm `norm`."""
    if adam.grad_clip_norm > 0:
        factor = min(1.0, adam.grad_clip_norm / (norm + CLIP_EPSILON))
        if factor < 1.0:
            for parameter in parameters(optimizer):
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
    for group in optimizer.param_groups:
        group["lr"] = adam.learning_rate
        group["betas"] = (adam.beta1, adam.beta2)
        group["eps"] = adam.eps
        group["weight_decay"] = adam.weight_decay
    optimizer.step_with_ready_grads()
