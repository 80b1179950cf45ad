"""One rank's engine: the base model, its tenants, and the operations on them. Runs in one thread, in one process.

Every rank of a group runs the same operations in the same order; what a rank gets back is its own part of a
result. Use it through `rank.Rank` in a Ray actor, or directly inside `engine.opened`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from megatron.core import parallel_state
from torch._C._distributed_c10d import Store

from actors import checkpoint, checkpoint_parts, device, loss_pass, snapshot, weights
from actors import optimizer as adamw
from actors.contract import (
    EngineConfig,
    FullConfig,
    MicrobatchOutput,
    PassFailed,
    StepOutput,
    TenantConfig,
    WindowIncomplete,
)
from actors.gradient_dump import GradientDump
from actors.models.build import LogprobModel, build
from actors.models.families import spec_of
from actors.packing import PackedRequest, Schedule, slots
from actors.parallel import all_ranks_agree, answers, join
from actors.residency import Residency
from actors.tenants import Tenant, Tenants
from actors.transforms import plan
from actors.transforms.model import QuantizedWeights
from actors.writer import Writer
from bus.events import AdamParams

T = TypeVar("T")


class Engine:
    """See the module. Construct inside `device.use()` and `layout.join`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        layout = config.layout
        self.spec = spec_of(config.model_folder)
        layout.check(self.spec)
        self.base = self._new_base()
        for chunk in self.base:
            chunk.requires_grad_(False)
        if config.fake_int4 is not None:
            plan.check(config.fake_int4, self.spec, layout.tp)
            QuantizedWeights(self.base, self.spec, config.fake_int4).bake()
        tenants = Tenants(self.base, self.spec, layout, self._new_base, config.fake_int4)
        away = config.away / f"rank{dist.get_rank()}" if config.away is not None else None
        self.tenants = Residency(tenants, config.max_resident_models, away)
        self._writer = Writer()

    def _new_base(self) -> list[LogprobModel]:
        config = self._config
        chunks = build(self.spec, config.layout, fused_head=config.fused_head, dtype=config.dtype)
        for chunk in chunks:
            weights.load(chunk, self.spec, config.model_folder)
        return chunks

    def create(self, model_id: str, config: TenantConfig) -> None:
        """A fresh tenant. Creating one that exists is an error of the caller, as is FullConfig in bfloat16."""
        if model_id in self.tenants:
            raise ValueError(f"model {model_id!r} is in memory already")
        if isinstance(config, FullConfig) and self._config.dtype != "float32":
            raise ValueError(
                f"model {model_id!r} would train every parameter in {self._config.dtype}, without float32 copies to "
                "step; use a LoRA adapter, or dtype float32"
            )
        self.tenants.create(model_id, config)

    def unload(self, model_id: str) -> None:
        self.tenants.drop(model_id)

    def snapshot(self, model_id: str, folder: Path) -> None:
        """Copy this rank's part of the tenant, and begin to write it to a file of its own in `folder`."""
        file = snapshot.file_in(folder, dist.get_rank())
        state = snapshot.take(self.tenants.activate(model_id))
        self._writer.begin(file, partial(snapshot.write, state, file))

    def snapshot_written(self, folder: Path) -> str | None:
        """None while the file is being written; then "" where it is on the disk, else what went wrong."""
        return self._writer.outcome(snapshot.file_in(folder, dist.get_rank()))

    def restore(self, model_id: str, config: TenantConfig, folder: Path) -> None:
        """The tenant as it was when the snapshot in `folder` was taken, by as many ranks.

        PassFailed, on all ranks, where one cannot read its part; there is no such tenant then.
        """
        state = self._read("snapshot", lambda: snapshot.read(snapshot.file_in(folder, dist.get_rank())))
        self.create(model_id, config)
        snapshot.restore(self.tenants.activate(model_id), state)

    def save(self, model_id: str, folder: Path, optimizer: bool) -> None:
        """Copy this rank's part of a checkpoint, and begin to write it to a file of its own in `folder`.

        The window is left alone, and is no part of it.
        """
        file = checkpoint_parts.file_in(folder, dist.get_rank())
        part = checkpoint.take(self.tenants.activate(model_id), optimizer=optimizer)
        self._writer.begin(file, partial(checkpoint_parts.write, part, file))

    def saved(self, folder: Path) -> str | None:
        """As `snapshot_written`, of `save`."""
        return self._writer.outcome(checkpoint_parts.file_in(folder, dist.get_rank()))

    def load(self, model_id: str, folder: Path, optimizer: bool) -> None:
        """Make a tenant what a checkpoint of its configuration is. The window ends.

        With `optimizer` it goes on with the optimizer's state and counters, else with a fresh optimizer. PassFailed,
        on all ranks, where one cannot read it; the tenant and its window are then as before.
        """
        tenant = self.tenants.activate(model_id)
        found = self._read("checkpoint", lambda: checkpoint.read(tenant, folder, optimizer=optimizer))
        checkpoint.put(tenant, found)

    def create_from(self, model_id: str, config: TenantConfig, folder: Path, optimizer: bool) -> None:
        """A tenant that starts from a checkpoint. PassFailed as `load`; there is no such tenant then."""
        self.create(model_id, config)
        try:
            self.load(model_id, folder, optimizer)
        except PassFailed:
            self.unload(model_id)
            raise

    @staticmethod
    def _read(what: str, read: Callable[[], T]) -> T:
        """What every rank could read its part of; PassFailed on all of them where one could not."""
        failure: Exception | None = None
        try:
            found = read()
        except Exception as error:  # told to every rank below, then raised
            failure = error
        if not all_ranks_agree(failure is None):
            if failure is None:
                raise PassFailed(f"another rank's part of the {what} cannot be read", elsewhere=True)
            raise PassFailed(f"{type(failure).__name__}: {failure}") from failure
        return found

    def forward_backward(
        self, model_id: str, requests: Sequence[PackedRequest], labels: Sequence[int] = ()
    ) -> list[list[MicrobatchOutput] | PassFailed]:
        """Run this rank's microbatches of some requests in one pass: all `forward_only`, or none.

        Gives this rank's outputs for each request, or PassFailed, on all ranks, for one that failed on any; its
        window is then as if it had never been there, and so are the outputs and bits of the others. `labels` are
        the caller's names for the requests; a step that finds one lost names it.
        """
        tenant = self.tenants.activate(model_id)
        labels = labels or [0] * len(requests)
        try:
            return list(self._pass(tenant, requests))
        except PassFailed as error:
            if len(requests) == 1:
                if not requests[0].forward_only:
                    tenant.window.lost.add(labels[0])
                return [error]
        # One of them is at fault, and nothing of the pass remains: each on its own, in the same order.
        alone = zip(requests, labels, strict=True)
        return [self.forward_backward(model_id, [request], [label])[0] for request, label in alone]

    def _pass(self, tenant: Tenant, requests: Sequence[PackedRequest]) -> list[list[MicrobatchOutput]]:
        forward_only = requests[0].forward_only
        firsts, microbatches = [], tenant.window.microbatches
        for request in requests:
            firsts.append(0 if forward_only else microbatches)
            microbatches += len(request.microbatches)
        rank = parallel_state.get_data_parallel_rank()
        chosen = slots(requests, firsts, rank, self._schedule(requests))
        with contextlib.nullcontext() if forward_only else tenant.window.accumulate():
            outputs: list[list[MicrobatchOutput]] = []
            failure: Exception | None = None
            try:
                with tenant.quantized.applied() if tenant.quantized else contextlib.nullcontext():
                    outputs = loss_pass.run(tenant.chunks, requests, chosen)
            except Exception as error:  # told to every rank below, then raised
                failure = error
            if not all_ranks_agree(failure is None):
                if failure is None:
                    raise PassFailed("the pass failed on another rank", elsewhere=True)
                raise PassFailed(str(failure)) from failure
        if not forward_only:
            for request in requests:
                tenant.window.add(len(request.microbatches), request.num_tokens)
        return outputs if answers() else [[] for _ in requests]

    def _schedule(self, requests: Sequence[PackedRequest]) -> Schedule:
        layout = self._config.layout
        return Schedule(
            dp=layout.dp,
            lockstep=layout.lockstep,
            multiple=layout.pp if layout.virtual_pp > 1 else 1,
            columns_multiple=layout.tp if layout.sequence_parallel else 1,
            one_at_a_time=layout.lockstep > 1 and all(r.one_datum_microbatches for r in requests),
        )

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
        sharded = self._config.layout.distributed_optimizer
        if self._config.dump_gradients is not None:
            dump = GradientDump(self._config.dump_gradients, tenant, adam, sharded=sharded)
        norm = adamw.gradient_norm(optimizer, sharded=sharded)
        skipped = not math.isfinite(norm)
        if not skipped:
            adamw.step(optimizer, adam, norm)
            if tenant.quantized is not None:
                tenant.quantized.stale()
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
