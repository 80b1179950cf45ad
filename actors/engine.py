"""One rank's engine: the base model, its tenants, and the operations on them. Runs in one thread, in one process.

Every rank of a group runs the same operations in the same order; what a rank gets back is its own part of a
result. Use it through `rank.Rank` in a Ray actor, or directly inside `engine.opened`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron.core import parallel_state
from torch._C._distributed_c10d import Store

from actors import device, loss_pass, weights
from actors import optimizer as adamw
from actors.gradient_dump import GradientDump
from actors.layout import Layout, all_ranks_agree, join
from actors.lora import AdapterConfig
from actors.loss_pass import MicrobatchOutput
from actors.models.build import build
from actors.models.families import spec_of
from actors.packing import PackedRequest, share
from actors.tenants import Tenants
from actors.window import PassFailed, WindowIncomplete
from bus.events import AdamParams


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What a rank needs to know to come up."""

    model_folder: Path
    layout: Layout = field(default_factory=Layout)
    dump_gradients: Path | None = None
    """Folder for `gradient_dump`; None turns it off."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What an optimizer step reports; the same on every rank."""

    grad_norm: float
    """Before clipping; NaN or inf where the gradient was."""
    skipped: bool
    """A non-finite gradient: weights and optimizer untouched, window cleared."""
    step: int
    window_calls: int
    window_tokens: int
    finalizations: int
    """Of this window: always 1."""
    seconds: float


class Engine:
    """See the module. Construct inside `device.use()` and `layout.join`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.spec = spec_of(config.model_folder)
        self.model = build(self.spec)
        weights.load(self.model, self.spec, config.model_folder)
        self.model.requires_grad_(False)
        self.tenants = Tenants(self.model, self.spec, config.layout)

    def create(self, model_id: str, adapter: AdapterConfig) -> None:
        """A fresh tenant. Creating one that exists is an error of the caller."""
        if model_id in self.tenants:
            raise ValueError(f"model {model_id!r} is in memory already")
        self.tenants.create(model_id, adapter)

    def unload(self, model_id: str) -> None:
        self.tenants.drop(model_id)

    def forward_backward(
        self, model_id: str, request: PackedRequest, label: int = 0
    ) -> list[MicrobatchOutput]:
        """Run this rank's microbatches of a request. Raises PassFailed on all ranks when it failed on one.

        `label` is the caller's name for the call; a step that finds it lost names it.
        """
        tenant = self.tenants.activate(model_id)
        size = parallel_state.get_data_parallel_world_size()
        first = 0 if request.forward_only else tenant.window.microbatches
        chosen = share(request.microbatches, first, parallel_state.get_data_parallel_rank(), size)
        context = contextlib.nullcontext() if request.forward_only else tenant.window.accumulate()
        with context:
            outputs: list[MicrobatchOutput] = []
            failure: Exception | None = None
            try:
                outputs = loss_pass.run(self.model, request, chosen)
            except Exception as error:  # told to every rank below, then raised
                failure = error
            if not all_ranks_agree(failure is None):
                if not request.forward_only:
                    tenant.window.lost.add(label)
                raise PassFailed(str(failure) if failure else "the pass failed on another rank") from failure
        if not request.forward_only:
            tenant.window.add(len(request.microbatches), request.num_tokens)
        return outputs

    def clear_window(self, model_id: str) -> None:
        """Drop what the window holds, as a step does, without stepping."""
        tenant = self.tenants.activate(model_id)
        tenant.window.clear()
        tenant.optimizer.zero_grad()

    def optim_step(
        self, model_id: str, adam: AdamParams, accept_lost: frozenset[int] = frozenset()
    ) -> StepOutput:
        """Finalize the window once, then step, unless the gradient is not finite. An empty window has gradient 0.

        A window that lost a call raises WindowIncomplete and is cleared, unless whoever asked for the step knew
        of the call and names it in `accept_lost`.
        """
        started = time.perf_counter()
        tenant = self.tenants.activate(model_id)
        window, optimizer = tenant.window, tenant.optimizer
        if unknown := window.lost - accept_lost:
            self.clear_window(model_id)
            raise WindowIncomplete(min(unknown))
        window.finalize()
        optimizer.prepare_grads()
        dump = None
        if self._config.dump_gradients is not None:
            sharded = self._config.layout.distributed_optimizer
            dump = GradientDump(self._config.dump_gradients, tenant, adam, sharded=sharded)
        norm = adamw.gradient_norm(optimizer)
        skipped = not math.isfinite(norm)
        if not skipped:
            adamw.step(optimizer, adam, norm)
        tenant.steps += 1
        if dump is not None:
            dump.write()
        calls, tokens = window.calls, window.tokens
        window.clear()
        # After a step param.grad is the same memory as main_grad; left there it would double the next window.
        optimizer.zero_grad()
        return StepOutput(
            grad_norm=norm,
            skipped=skipped,
            step=tenant.steps,
            window_calls=calls,
            window_tokens=tokens,
            finalizations=1,
            seconds=time.perf_counter() - started,
        )


@contextlib.contextmanager
def opened(config: EngineConfig, rank: int, store: Store) -> Iterator[Engine]:
    """A rank's engine in this thread, joined to its group until the context ends."""
    with device.use(), join(config.layout, rank, store):
        yield Engine(config)
