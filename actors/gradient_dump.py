"""`debug.dump_gradients`: every step's gradient, weights and Adam state as safetensors, for comparison with others.

One file a rank and step, `<folder>/<model>/<step>/rank<r>.safetensors`, under PEFT's names:
`gradient.*` finalized, before clipping; `before.*` and `after.*` weights around the step; `exp_avg.*` and
`exp_avg_sq.*` after it where this rank holds them whole. Costs a copy of each, so it is off by default.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from safetensors.torch import save_file
from torch import Tensor, nn

from actors.tenants import Tenant
from bus.events import AdamParams
from bus.subjects import escape


def _gather_shards(tenant: Tenant) -> None:
    """After a reduce-scatter a rank holds its shard of the sum; fetch the others', so that the dump is whole."""
    for buffer in (*tenant.ddp.buffers, *tenant.ddp.expert_parallel_buffers):
        group = buffer.data_parallel_group
        if group.size() == 1:
            continue
        for bucket in buffer.buckets:
            mine = shard_buffer(bucket.grad_data, group.size())[group.rank()]
            dist.all_gather_into_tensor(bucket.grad_data, mine.clone(), group=group)


class GradientDump:
    """What one optimizer step looked like, written when it is over."""

    def __init__(self, folder: Path, tenant: Tenant, adam: AdamParams, *, sharded: bool) -> None:
        """Take the gradient (finalized, not yet clipped) and the weights before the step."""
        self._tenant = tenant
        self._sharded = sharded
        file = f"rank{dist.get_rank()}.safetensors"
        self._path = folder / escape(tenant.model_id) / f"{tenant.steps:06d}" / file
        self._about = {"step": tenant.steps, "adam_params": msgspec.to_builtins(adam)}
        if sharded:
            _gather_shards(tenant)
        self._tensors = self._named("gradient", lambda p: p.main_grad)  # type: ignore[attr-defined]
        self._tensors |= self._named("before", lambda p: p.detach())

    def _named(self, kind: str, tensor_of: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
        tensors = self._tenant.adapters.peft_tensors(tensor_of)
        return {f"{kind}.{name}": t.detach().clone().cpu().contiguous() for name, t in tensors.items()}

    def _moment(self, name: str, parameter: nn.Parameter) -> Tensor:
        for (_, key), state in self._tenant.optimizer.state.items():
            if key is parameter:
                moment: Tensor = state[name]
                return moment
        return torch.zeros_like(parameter)  # no step has been taken yet

    def write(self) -> None:
        """Add the weights and Adam state after the step, and write the file in one rename."""
        self._tensors |= self._named("after", lambda p: p.detach())
        if not self._sharded:
            for moment in ("exp_avg", "exp_avg_sq"):
                self._tensors |= self._named(moment, partial(self._moment, moment))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(f".{os.getpid()}")
        save_file(self._tensors, unfinished, metadata={"tinkerbus": json.dumps(self._about)})
        unfinished.rename(self._path)
