"""The gradient window: what a tenant accumulates between two optimizer steps.

Always holds: a pass only accumulates on this rank, without any communication; `finalize` communicates once for the
whole window, on every rank, also on one that saw no microbatch; a pass that fails leaves the window as it was.
Finalizing per pass would be wrong, not only slow: the distributed optimizer's reduce-scatter overwrites this rank's
shard and leaves local values elsewhere, so the next pass would accumulate onto a mix.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from torch import Tensor


class PassFailed(RuntimeError):
    """A pass failed on this rank or another one; the window is as it was before it."""


class WindowIncomplete(RuntimeError):
    """The step's window lost the call `label`; the window was cleared and nothing stepped."""

    def __init__(self, label: int) -> None:
        super().__init__(label)
        self.label = label

    def __str__(self) -> str:
        return f"the window lost call {self.label}"


class Window:
    """Gradient buffers of one tenant, and what they hold."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self.calls = 0
        """`forward_backward` requests since the last step."""
        self.microbatches = 0
        """Their microbatches, over all ranks; decides which rank runs the next one."""
        self.tokens = 0
        self.lost: set[int] = set()
        """Labels of this window's calls that failed on the ranks."""

    def _gradients(self) -> list[Tensor]:
        return [b.grad_data for b in (*self._ddp.buffers, *self._ddp.expert_parallel_buffers)]

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Within it passes add to the buffers; an exception puts the buffers back."""
        before = [g.clone() for g in self._gradients()]
        try:
            with self._ddp.no_sync():
                yield
        except BaseException:
            for gradient, saved in zip(self._gradients(), before, strict=True):
                gradient.copy_(saved)
            raise

    def add(self, microbatches: int, tokens: int) -> None:
        """Count a request whose pass succeeded on every rank."""
        self.calls += 1
        self.microbatches += microbatches
        self.tokens += tokens

    def finalize(self) -> None:
        """Sum the window's gradient over the data-parallel ranks. Every rank calls it once per step."""
        finalize_model_grads([self._ddp], None)

    def clear(self) -> None:
        """Start an empty window."""
        self._ddp.zero_grad_buffer()
        self.calls = self.microbatches = self.tokens = 0
        self.lost.clear()
