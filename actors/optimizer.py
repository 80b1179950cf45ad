"""AdamW with hyperparameters per call, and the veto of non-finite gradients.

Semantics are torch.optim.AdamW's (decoupled decay on every parameter, global-norm clipping before the step), with
Megatron's optimizer holding the state, sharded over data-parallel ranks where the layout says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor, nn

from bus.events import AdamParams

CLIP_EPSILON = 1e-6
"""Added to the norm by torch.nn.utils.clip_grad_norm_, so by us."""


def build(ddps: Sequence[DistributedDataParallel], *, distributed: bool) -> MegatronOptimizer:
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
    return get_megatron_optimizer(config, list(ddps), use_gloo_process_groups=False)


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def parameters(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """What the optimizer steps on this rank: parameters, or this rank's shards of them."""
    for part in _parts(optimizer):
        if not part.is_stub_optimizer:  # a pipeline stage may have nothing to train
            yield from part.get_parameters()


def _counts(parameter: Tensor, *, sharded: bool) -> bool:
    """Whether this rank's copy is the one that counts in the norm, of all the ranks that hold it."""
    if not (param_is_not_tensor_parallel_duplicate(parameter) and param_is_not_shared(parameter)):
        return False
    if sharded:
        return True
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_rank() == 0
    return parallel_state.get_expert_data_parallel_rank() == 0


@torch.no_grad()
def gradient_norm(optimizer: MegatronOptimizer, *, sharded: bool) -> float:
    """Global L2 norm of the finalized gradient, accumulated in float64, equal on every rank.

    Call after `prepare_grads`. Whatever several ranks hold counts once: replicas, and an embedding that the first
    and the last stage share. `sharded`: data-parallel ranks hold shards, not replicas.
    """
    squares = torch.zeros(1, dtype=torch.float64, device="cuda")
    for parameter in parameters(optimizer):
        if parameter.grad is not None and _counts(parameter, sharded=sharded):
            squares += parameter.grad.double().pow(2).sum()
    dist.all_reduce(squares)
    total = squares.item()
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


def _slots(optimizer: MegatronOptimizer) -> Iterator[tuple[torch.optim.Optimizer, Tensor]]:
    """Each of torch's optimizers with each parameter that it steps on this rank, in an order that stays the same."""
    for part in _parts(optimizer):
        if not part.is_stub_optimizer:
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    yield part.optimizer, parameter


def states(optimizer: MegatronOptimizer) -> list[dict[str, Any]]:
    """The state of every parameter that this rank steps, empty before its first step."""
    return [dict(inner.state.get(parameter, {})) for inner, parameter in _slots(optimizer)]


def set_states(optimizer: MegatronOptimizer, found: Sequence[dict[str, Any]]) -> None:
    """The inverse of `states`, on an optimizer over parameters of the same shapes."""
    for (inner, parameter), state in zip(_slots(optimizer), found, strict=True):
        if state:
            inner.state[parameter] = {
                name: value.to(parameter.device) if isinstance(value, Tensor) and value.dim() else value
                for name, value in state.items()
            }


def adam_steps(optimizer: MegatronOptimizer) -> int:
    """Steps that Adam has taken with what this rank steps; 0 where that is nothing."""
    return max((int(state["step"]) for state in states(optimizer) if state), default=0)


def reset(optimizer: MegatronOptimizer) -> None:
    """As it was before its first step."""
    for inner, parameter in _slots(optimizer):
        inner.state.pop(parameter, None)


def set_moments(
    optimizer: MegatronOptimizer, parameter: nn.Parameter, moments: dict[str, Tensor], steps: int
) -> None:
    """Set `exp_avg` and `exp_avg_sq` of a parameter, each shaped like it: the inverse of `moment`."""
    for part in _parts(optimizer):
        if part.is_stub_optimizer:
            continue
        if isinstance(part, DistributedOptimizer):
            if parameter not in part.model_param_group_index_map:
                continue
            group, order = part.model_param_group_index_map[parameter]
            held = part.optimizer.param_groups[group]["params"][order]
            mine = part._get_model_param_range_map(parameter)["param"]
            values = {name: value.reshape(-1)[mine.start : mine.end] for name, value in moments.items()}
        elif any(parameter is own for group in part.optimizer.param_groups for own in group["params"]):
            held, values = parameter, moments
        else:
            continue
        state: dict[str, Tensor] = {"step": torch.tensor(float(steps))}
        for name, value in values.items():
            state[name] = value.to(held.device, torch.float32, copy=True).reshape(held.shape)
        part.optimizer.state[held] = state


@torch.no_grad()
def moment(optimizer: MegatronOptimizer, name: str, parameter: nn.Parameter) -> Tensor:
    """`exp_avg` or `exp_avg_sq` of a parameter, shaped like it; zeros before its first step.

    Collective where the state is sharded over data-parallel ranks: every rank asks for the same parameters.
    """
    for part in _parts(optimizer):
        if part.is_stub_optimizer:
            continue
        if not isinstance(part, DistributedOptimizer):
            found = part.optimizer.state.get(parameter)
            if found is not None:
                values: Tensor = found[name]
                return values
        elif any(parameter in buffer.param_index_map for buffer in part.buffers):
            return _gathered(part, name, parameter)
    return torch.zeros_like(parameter)


def _gathered(part: DistributedOptimizer, name: str, parameter: nn.Parameter) -> Tensor:
    flat = torch.zeros_like(parameter).view(-1)
    if parameter in part.model_param_group_index_map:
        group, order = part.model_param_group_index_map[parameter]
        shard = part.optimizer.param_groups[group]["params"][order]
        mine = part._get_model_param_range_map(parameter)["param"]
        if shard in part.optimizer.state:
            flat[mine.start : mine.end] = part.optimizer.state[shard][name]
    # Shards do not overlap, so the sum adds zeros and is exact.
    dist.all_reduce(flat, group=part.data_parallel_group)
    return flat.view(parameter.shape)
