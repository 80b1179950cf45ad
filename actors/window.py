"""The gradient window: what a tenant accumulates between two optimizer steps.

Always holds: a pass only accumulates on this rank, without any communication; `finalize` communicates once for the
whole window, on every rank, also on one that saw no microbatch; a pass that fails leaves the window as it was.
Finalizing per pass would be wrong, not only slow: the distributed optimizer's reduce-scatter overwrites this rank's
shard and leaves local values elsewhere, so the next pass would accumulate onto a mix.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from torch import Tensor


class Window:
    """Gradient buffers of one tenant, and what they hold."""

    def __init__(self, ddps: Sequence[DistributedDataParallel], *, overlap: bool = False) -> None:
        """`ddps`: one for each model chunk. `overlap`: they reduce their buckets asynchronously."""
        self._ddps = ddps
        self._overlap = overlap
        self.calls = 0
        """`forward_backward` requests since the last step."""
        self.microbatches = 0
        """Their microbatches, over all ranks; decides which rank runs the next one."""
        self.tokens = 0
        self.lost: set[int] = set()
        """Labels of this window's calls that failed on the ranks."""

    def buffers(self) -> list[Tensor]:
        """The gradient buffers themselves, in an order that is the same every time."""
        return [
            buffer.grad_data for ddp in self._ddps for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers)
        ]

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Within it passes add to the buffers; an exception puts the buffers back."""
        before = [gradient.clone() for gradient in self.buffers()]
        try:
            with contextlib.ExitStack() as stack:
                for ddp in self._ddps:
                    stack.enter_context(ddp.no_sync())
                yield
        except BaseException:
            for gradient, saved in zip(self.buffers(), before, strict=True):
                gradient.copy_(saved)
            raise

    def add(self, microbatches: int, tokens: int) -> None:
        """Count a request whose pass succeeded on every rank."""
        self.calls += 1
        self.microbatches += microbatches
        self.tokens += tokens

    def finalize(self) -> None:
        """Sum the window's gradient over whoever holds parts of it. Every rank calls it once per step.

        Data-parallel replicas sum everything; tensor-parallel ranks what each computed in part (norms of their own
        heads, norms under sequence parallelism); the first and the last stage the embedding they share.
        """
        if self._overlap:
            # Megatron starts a bucket when its last gradient of the last pass is there. Which pass is a window's
            # last one shows only now.
            for ddp in self._ddps:
                ddp.start_grad_sync()
        finalize_model_grads(list(self._ddps), None)

    def clear(self) -> None:
        """Start an empty window."""
        for ddp in self._ddps:
            ddp.zero_grad_buffer()
        self.calls = self.microbatches = self.tokens = 0
        self.lost.clear()
