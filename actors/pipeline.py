"""Messages between interleaved pipeline stages: directions that never mix, shapes that nobody has to send.

Megatron tells a message by its two ranks and its place in the order of messages. With two stages each one is the
other's next and previous stage, so that activations and gradients travel between the same two ranks and one may be
taken for the other. Here gradients have a process group of their own. Megatron also sends the shape of a tensor of
variable length ahead and waits for it, which two stages that prefetch from each other do for ever; but every stage
knows the microbatches of a pass, and in which order their tensors come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from actors import device
from actors.layout import Layout

Shape = tuple[int, int, int]
"""Of a hidden state as it travels: (sequence on this rank, batch, hidden)."""

_gradients: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
"""By the group of a pipeline, the group that its gradients travel in."""


def open_gradient_groups(layout: Layout) -> None:
    """Every rank calls it once, when Megatron's parallel state is there."""
    _gradients.clear()
    if layout.virtual_pp == 1:
        return
    stage = layout.world_size // layout.pp
    own = parallel_state.get_pipeline_model_parallel_group()
    for first in range(stage):
        group = dist.new_group(list(range(first, layout.world_size, stage)))
        if dist.get_rank() % stage == first:
            assert isinstance(group, dist.ProcessGroup)
            _gradients[own] = group


class Interleaved(P2PCommunicator):
    """Of one pass over microbatches of given shapes."""

    def __init__(self, config: TransformerConfig, shapes: Sequence[Shape]) -> None:
        own = parallel_state.get_pipeline_model_parallel_group()
        super().__init__(own, config)
        self._gradients = _gradients[own]
        chunks = config.virtual_pipeline_model_parallel_size
        table = get_schedule_table(len(shapes), chunks, config.microbatch_group_size_per_vp_stage)
        first, last = own.rank() == 0, own.rank() == own.size() - 1
        # Forward runs through the table as it stands; backward through the same, from the last chunk to the first.
        self._inputs = iter([shapes[mb] for mb, chunk in table if not (first and chunk == 0)])
        self._output_gradients = iter([shapes[mb] for mb, chunk in table if not (last and chunk == 0)])

    def _room(self, wanted: bool, shapes: Iterator[Shape]) -> Tensor | None:
        if not wanted:
            return None
        dtype = self.config.pipeline_dtype
        return torch.empty(next(shapes), requires_grad=True, device=device.device(), dtype=dtype)

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, dict[str, Any] | None]:
        """Megatron's contract; `tensor_shape` is only an upper bound here, and not asked."""
        del tensor_shape
        from_prev = self._room(recv_prev, self._inputs)
        from_next = self._room(recv_next, self._output_gradients)
        works: dict[str, Any] = {}
        for name, way, tensor, peer, group in (
            ("send_next", dist.isend, tensor_send_next, self.next_rank, self.pp_group),
            ("recv_prev", dist.irecv, from_prev, self.prev_rank, self.pp_group),
            ("send_prev", dist.isend, tensor_send_prev, self.prev_rank, self._gradients),
            ("recv_next", dist.irecv, from_next, self.next_rank, self._gradients),
        ):
            if tensor is not None:
                works[name] = way(tensor, peer, group=group)
        if not wait_on_reqs:
            return from_prev, from_next, works
        for work in works.values():
            work.wait()
        return from_prev, from_next, None


def communication(config: TransformerConfig, shapes: Sequence[Shape]) -> dict[str, Any]:
    """Arguments of Megatron's schedule; empty where stages do not interleave."""
    if config.virtual_pipeline_model_parallel_size is None:
        return {}
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {"p2p_communicator": Interleaved(config, shapes), "pg_collection": groups}
