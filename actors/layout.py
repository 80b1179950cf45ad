"""How a group's ranks are laid out over data, tensor and pipeline parallelism, refused here or right.

Public: `Layout`, `LayoutError`, `join` (one rank's part in torch.distributed and Megatron's parallel state).
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch._C._distributed_c10d import Store

from actors import device


class LayoutError(ValueError):
    """A layout that cannot work; the message says why in one sentence."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Parallel sizes of one group. World size is their product."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    distributed_optimizer: bool = False
    """Shard gradients after the reduce-scatter, and the optimizer's state, over the data-parallel ranks."""

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp"):
            size = getattr(self, name)
            if size < 1:
                raise LayoutError(f"layout.{name} is {size}; it must be at least 1")
        for name in ("tp", "pp"):
            if getattr(self, name) > 1:
                raise LayoutError(
                    f"layout.{name} is {getattr(self, name)}, but this release trains with {name}=1 only"
                )

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp


@contextlib.contextmanager
def join(
    layout: Layout, rank: int, store: Store, timeout: datetime.timedelta = datetime.timedelta(minutes=10)
) -> Iterator[None]:
    """Make this process rank `rank` of `layout` until the context ends. Needs `device.use()` around it."""
    dist.init_process_group(
        device.backend(), rank=rank, world_size=layout.world_size, store=store, timeout=timeout
    )
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            distributed_timeout_minutes=max(1, int(timeout.total_seconds() // 60)),
            create_gloo_process_groups=False,
        )
        # The inference tracker needs no CUDA generator; there is no dropout to draw numbers for.
        model_parallel_cuda_manual_seed(0, inference_rng_tracker=True, force_reset_rng=True)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def all_ranks_agree(ok: bool) -> bool:
    """True when every rank of the world passes True. One small collective; free on a single rank."""
    if dist.get_world_size() == 1:
        return ok
    flag = torch.tensor([1.0 if ok else 0.0], device=device.device())
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item() > 0)
