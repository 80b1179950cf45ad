"""A tenant's checkpoint on the ranks: whole tensors under PEFT's or Hugging Face's names, whatever the layout.

Each rank copies what it is the first to hold, and reads what it needs, so a checkpoint of one layout loads under any
other: equal weights, equal Adam state, bit for bit. The gradient window is no part of it; loading ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from actors import optimizer as adamw
from actors.checkpoint_files import OPTIMIZER, optimizer_state, weights_file
from actors.checkpoint_parts import MOMENTS, Kind, Part
from actors.tenants import Tenant
from actors.tensor_file import TensorFile

_EXPERTS = ".experts."


@dataclass(slots=True)
class Found:
    """This rank's part of a checkpoint, in memory."""

    weights: list[tuple[nn.Parameter, Tensor]]
    moments: list[tuple[nn.Parameter, dict[str, Tensor]]] = field(default_factory=list)
    steps: int = 0
    adam_steps: int = 0


def take(tenant: Tenant, *, optimizer: bool) -> Part:
    """A copy of this rank's part, with Adam's moments where `optimizer`. Collective: every rank asks for the same."""
    part = Part(
        parallel_state.get_tensor_model_parallel_rank(), tenant.steps, adamw.adam_steps(tenant.optimizer)
    )
    _copy(tenant, part, "weight", lambda parameter: parameter.detach())
    for moment in MOMENTS if optimizer else ():
        _copy(tenant, part, moment, partial(adamw.moment, tenant.optimizer, moment))
    return part


def _copy(tenant: Tenant, part: Part, kind: Kind, tensor_of: Callable[[nn.Parameter], Tensor]) -> None:
    first = parallel_state.get_data_parallel_rank() == 0
    first_expert = parallel_state.get_expert_data_parallel_rank() == 0
    for shard in tenant.shards(tensor_of):
        if first_expert if _EXPERTS in shard.name else first:
            part.tensors[f"{kind}.{shard.name}"] = shard.tensor.detach().to("cpu", copy=True)
            if shard.split is not None and shard.size is not None:
                part.splits[shard.name] = (shard.split, shard.size)


def read(tenant: Tenant, folder: Path, *, optimizer: bool) -> Found:
    """What the tenant's parameters become. Raises OSError or ValueError for a folder that has not all of it."""
    found = Found(_values(tenant, TensorFile(*weights_file(folder, tenant.config))))
    if optimizer:
        found.steps, found.adam_steps = optimizer_state(folder)
        by_kind = [_values(tenant, TensorFile(folder / OPTIMIZER, f"{moment}.")) for moment in MOMENTS]
        for rows in zip(*by_kind, strict=True):
            moments = {str(moment): values for moment, (_, values) in zip(MOMENTS, rows, strict=True)}
            found.moments.append((rows[0][0], moments))
    return found


def _values(tenant: Tenant, file: TensorFile) -> list[tuple[nn.Parameter, Tensor]]:
    return list(tenant.from_whole(file))


@torch.no_grad()
def put(tenant: Tenant, found: Found) -> None:
    """Make the tenant what was read: its weights, and the optimizer's state, or none."""
    tenant.window.clear()
    tenant.optimizer.zero_grad()
    adamw.reset(tenant.optimizer)
    for parameter, values in found.weights:
        parameter.copy_(values)
    if found.adam_steps:
        for parameter, moments in found.moments:
            adamw.set_moments(tenant.optimizer, parameter, moments, found.adam_steps)
    tenant.steps = found.steps
    if tenant.quantized is not None:
        tenant.quantized.stale()
