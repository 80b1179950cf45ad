"""`debug.dump_gradients`: every step's gradient, weights and Adam state as safetensors, for comparison with others.

One file a rank and step, `<folder>/<model>/<step>/rank<r>.safetensors`, under PEFT's names, or Hugging Face's where
the whole model trains: `gradient.*` finalized, before clipping; `before.*` and `after.*` weights around the step;
`exp_avg.*` and `exp_avg_sq.*` after it. A file holds its rank's part; its metadata says which, and `read` puts the
parts together. Costs a copy of each, so it is off by default.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from actors import optimizer as adamw
from actors.shards import Shard, gather
from actors.tenants import Tenant
from bus.events import AdamParams
from bus.subjects import escape


def _gather_shards(tenant: Tenant) -> None:
    """After a reduce-scatter a rank holds its shard of the sum; fetch the others', so that the dump is whole."""
    for ddp in tenant.ddps:
        for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers):
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
        file = f"rank{dist.get_rank()}.safetensors"
        self._path = folder / escape(tenant.model_id) / f"{tenant.steps:06d}" / file
        self._splits: dict[str, tuple[int, int]] = {}
        self._tensors: dict[str, Tensor] = {}
        self._adam = adam
        self._step = tenant.steps
        if sharded:
            _gather_shards(tenant)
        self._take("gradient", lambda p: p.main_grad)  # type: ignore[attr-defined]
        self._take("before", lambda p: p.detach())

    def _take(self, kind: str, tensor_of: Callable[[nn.Parameter], Tensor]) -> None:
        for shard in self._tenant.shards(tensor_of):
            self._tensors[f"{kind}.{shard.name}"] = shard.tensor.detach().clone().cpu().contiguous()
            if shard.split is not None and shard.size is not None:
                self._splits[shard.name] = (shard.split, shard.size)

    def write(self) -> None:
        """Add the weights and Adam state after the step, and write the file in one rename."""
        self._take("after", lambda p: p.detach())
        for moment in ("exp_avg", "exp_avg_sq"):
            self._take(moment, partial(adamw.moment, self._tenant.optimizer, moment))
        about = {
            "step": self._step,
            "adam_params": msgspec.to_builtins(self._adam),
            "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
            "splits": self._splits,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(f".{os.getpid()}")
        save_file(self._tensors, unfinished, metadata={"tinkerbus": json.dumps(about)})
        unfinished.rename(self._path)


def ranks_of(folder: Path, model_id: str, step: int) -> list[int]:
    """The ranks that dumped a step."""
    files = (folder / escape(model_id) / f"{step:06d}").glob("rank*.safetensors")
    return sorted(int(file.stem.removeprefix("rank")) for file in files)


def rank_shards(folder: Path, model_id: str, step: int, rank: int, kind: str) -> tuple[int, list[Shard]]:
    """A rank's tensor-parallel rank, and its part of every tensor of a kind."""
    path = folder / escape(model_id) / f"{step:06d}" / f"rank{rank}.safetensors"

    def found() -> Iterator[Shard]:
        for key in file.keys():  # noqa: SIM118 - not a mapping
            if key.startswith(f"{kind}."):
                name = key.removeprefix(f"{kind}.")
                split, size = about["splits"].get(name, (None, None))
                yield Shard(name, file.get_tensor(key), split, size)

    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["tinkerbus"])
        return about["tp_rank"], list(found())


def read(folder: Path, model_id: str, step: int, kind: str) -> dict[str, Tensor]:
    """Whole tensors of one kind ("gradient", "before", …) by name, from all ranks' files."""
    ranks = ranks_of(folder, model_id, step)
    return gather(rank_shards(folder, model_id, step, rank, kind) for rank in ranks)
