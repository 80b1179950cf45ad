"""One rank's part in torch.distributed and in Megatron's parallel state."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch._C._distributed_c10d import Store

from actors import device, pipeline
from actors.layout import Layout


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
            virtual_pipeline_model_parallel_size=layout.virtual_pp if layout.virtual_pp > 1 else None,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=max(1, int(timeout.total_seconds() // 60)),
            create_gloo_process_groups=False,
        )
        pipeline.open_gradient_groups(layout)
        # The inference tracker needs no CUDA generator; there is no dropout to draw numbers for.
        model_parallel_cuda_manual_seed(0, inference_rng_tracker=True, force_reset_rng=True)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def answers() -> bool:
    """Whether this rank speaks for its data-parallel replica: it holds the loss, and is the first of those that do."""
    return parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0


def all_ranks_agree(ok: bool) -> bool:
    """True when every rank of the world passes True. One small collective; free on a single rank."""
    if dist.get_world_size() == 1:
        return ok
    flag = torch.tensor([1.0 if ok else 0.0], device=device.device())
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item() > 0)
