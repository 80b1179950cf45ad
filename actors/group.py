"""All ranks of one base model, driven as one: an operation goes to every rank, and their parts come back merged.

Calls are pipelined: each method hands its operation to the ranks at once and returns a future, so the next
operation is already queued there while the current one runs. Ranks run operations in the order of the calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors import device
from actors.contract import (
    EngineConfig,
    MicrobatchOutput,
    PassFailed,
    StepOutput,
    TenantConfig,
    WindowIncomplete,
)
from actors.liveness import Liveness
from actors.models.spec import ModelSpec
from actors.packing import PackedRequest
from actors.rank import Rank
from bus.events import AdamParams
from loss_hub import merge

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 600
CPU_CLAIM = 0.1
"""Ray's CPU claims are logical; ranks take threads, not whole cores, so that small machines fit them."""


class GroupDied(RuntimeError):
    """A rank is gone, or failed where it must not. Nothing more can run on this group; it must be built anew."""


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """One group: what its ranks load, and how many threads each takes."""

    engine: EngineConfig
    threads_per_rank: int = 1
    heartbeat_timeout_s: float = 10.0
    """A rank that gives no sign of life for so long is killed, and the others with it."""
    gpus: bool = False


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of one `forward` or `forward_backward`."""

    logprobs: list[np.ndarray]
    """float32, one per datum in the request's order, shaped like its targets; nats."""
    metrics: dict[str, float]


def assemble(request: PackedRequest, outputs: Sequence[MicrobatchOutput]) -> RequestOutput:
    """Put the microbatches' outputs back into the request's order, whichever rank ran them."""
    by_index = sorted(outputs, key=lambda output: output.index)
    if [output.index for output in by_index] != list(range(len(request.microbatches))):
        raise RuntimeError(
            f"ranks answered for microbatches {[o.index for o in by_index]} of {len(request.microbatches)}"
        )
    logprobs: list[np.ndarray] = [np.empty(0)] * len(request.lengths)
    for output in by_index:
        for datum, values in zip(request.microbatches[output.index], output.logprobs, strict=True):
            logprobs[datum] = values
    return RequestOutput(logprobs, merge(output.metrics for output in by_index))


def _assembled(
    request: PackedRequest, parts: Sequence[list[MicrobatchOutput] | PassFailed]
) -> RequestOutput | PassFailed:
    failures = [part for part in parts if isinstance(part, PassFailed)]
    if failures:
        # The rank where it went wrong says what; the others say that it was another one.
        return min(failures, key=lambda failure: failure.elsewhere)
    return assemble(
        request, [output for part in parts if not isinstance(part, PassFailed) for output in part]
    )


class MegatronGroup:
    """See the module. Make one with `start`."""

    rank_class: type[Rank] = Rank

    def __init__(self, config: GroupConfig) -> None:
        self._config = config
        self._ranks: list[Any] = []
        self._placement: Any = None
        self._liveness: Liveness | None = None
        self._watch: asyncio.Task[None] | None = None
        self.spec: ModelSpec

    @classmethod
    async def start(cls, config: GroupConfig) -> MegatronGroup:
        """Start the ranks and load the base model. Ranks belong to the calling process and die with it."""
        group = cls(config)
        try:
            await asyncio.wait_for(group._start(), START_TIMEOUT_S)
        except BaseException:
            group.close()
            raise
        return group

    async def _start(self) -> None:
        size = self._config.engine.layout.world_size
        bundle: dict[str, float] = {"GPU": 1} if self._config.gpus else {"CPU": CPU_CLAIM}
        self._placement = placement_group([bundle] * size, strategy="PACK")
        await _awaited(self._placement.ready())
        threads = self._config.threads_per_rank
        remote = ray.remote(self.rank_class)
        self._ranks = [
            remote.options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                max_concurrency=1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._placement, placement_group_bundle_index=index
                ),
                runtime_env={"env_vars": {**device.environment(threads), "GLOO_SOCKET_IFNAME": "lo"}},
            ).remote(self._config.engine, index, size, threads)
            for index in range(size)
        ]
        self._liveness = liveness = await Liveness.open(LOOPBACK, size)
        port = await _awaited(self._ranks[0].host_store.remote(LOOPBACK))
        specs = await self._gather(
            [rank.join.remote(LOOPBACK, port, liveness.address) for rank in self._ranks]
        )
        self.spec = specs[0]
        self._watch = asyncio.create_task(liveness.watch(self._config.heartbeat_timeout_s, self._lost))

    def _lost(self, because: str) -> None:
        """What runs on the ranks fails with GroupDied once they are gone."""
        log.warning("%s; killing the group", because)
        assert self._liveness is not None
        self._liveness.kill()

    async def process_ids(self) -> list[int]:
        """Of every rank, in rank order."""
        pids: list[int] = await self._gather([rank.process_id.remote() for rank in self._ranks])
        return pids

    def create(self, model_id: str, config: TenantConfig) -> asyncio.Task[None]:
        return self._submit(_nothing, "create", model_id, config)

    def unload(self, model_id: str) -> asyncio.Task[None]:
        return self._submit(_nothing, "unload", model_id)

    def forward_backward(
        self, model_id: str, request: PackedRequest, label: int = 0
    ) -> asyncio.Task[RequestOutput]:
        """Raises PassFailed when it failed on a rank; the window is then as it was before."""
        both = self.forward_backward_together(model_id, [request], [label])

        async def alone() -> RequestOutput:
            (answer,) = await both
            if isinstance(answer, PassFailed):
                raise answer
            return answer

        return asyncio.ensure_future(alone())

    def forward_backward_together(
        self, model_id: str, requests: Sequence[PackedRequest], labels: Sequence[int]
    ) -> asyncio.Task[list[RequestOutput | PassFailed]]:
        """Requests of one kind in one pass; each has the answer and the bits that it has alone."""
        shared = ray.put(list(requests)) if len(self._ranks) > 1 else list(requests)

        def merged(
            parts: list[list[list[MicrobatchOutput] | PassFailed]],
        ) -> list[RequestOutput | PassFailed]:
            return [_assembled(request, answers) for request, *answers in zip(requests, *parts, strict=True)]

        return self._submit(merged, "forward_backward", model_id, shared, list(labels))

    def clear_window(self, model_id: str) -> asyncio.Task[None]:
        return self._submit(_nothing, "clear_window", model_id)

    def optim_step(
        self, model_id: str, adam: AdamParams, accept_lost: frozenset[int] = frozenset()
    ) -> asyncio.Task[StepOutput]:
        """Raises WindowIncomplete when a call of the window failed on the ranks and is not in `accept_lost`."""
        return self._submit(lambda parts: parts[0], "optim_step", model_id, adam, accept_lost)

    def snapshot(self, model_id: str, folder: Path) -> asyncio.Task[None]:
        """Every rank copies its part of the model and begins to write it into `folder`."""
        return self._submit(_nothing, "snapshot", model_id, folder)

    def snapshot_written(self, folder: Path) -> asyncio.Task[str | None]:
        """None while a rank still writes; then "" where all parts are on the disk, else what went wrong."""
        return self._submit(_first_error, "snapshot_written", folder)

    def restore(self, model_id: str, config: TenantConfig, folder: Path) -> asyncio.Task[None]:
        """The model as it was at a snapshot of as many ranks."""
        return self._submit(_nothing, "restore", model_id, config, folder)

    def save(self, model_id: str, folder: Path, *, optimizer: bool) -> asyncio.Task[None]:
        """Every rank copies its part of a checkpoint and begins to write it into `folder`."""
        return self._submit(_nothing, "save", model_id, folder, optimizer)

    def saved(self, folder: Path) -> asyncio.Task[str | None]:
        """As `snapshot_written`, of `save`."""
        return self._submit(_first_error, "saved", folder)

    def load(self, model_id: str, folder: Path, *, optimizer: bool) -> asyncio.Task[None]:
        """Go on from the checkpoint in `folder`. Raises PassFailed where it cannot be read; nothing changed then."""
        return self._submit(_nothing, "load", model_id, folder, optimizer)

    def create_from(
        self, model_id: str, config: TenantConfig, folder: Path, *, optimizer: bool
    ) -> asyncio.Task[None]:
        """A model that starts from a checkpoint. Raises PassFailed where it cannot be read; there is none then."""
        return self._submit(_nothing, "create_from", model_id, config, folder, optimizer)

    def close(self) -> None:
        """Kill the ranks and free their places. Safe to call twice."""
        if self._watch is not None:
            self._watch.cancel()
        if self._liveness is not None:
            self._liveness.kill()
            self._liveness.close()
            self._liveness = None
        for rank in self._ranks:
            ray.kill(rank)
        self._ranks = []
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None

    def _submit(self, merge_parts: Any, operation: str, *arguments: Any) -> asyncio.Task[Any]:
        references = [rank.execute.remote(operation, *arguments) for rank in self._ranks]

        async def finish() -> Any:
            try:
                return merge_parts(await self._gather(references))
            except (GroupDied, PassFailed, WindowIncomplete):
                raise
            except Exception as error:  # no rank knows any more what the others did
                cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
                raise GroupDied(f"{operation} of the ranks failed: {cause}") from error

        return asyncio.ensure_future(finish())

    async def _gather(self, references: list[Any]) -> list[Any]:
        results = await asyncio.gather(*map(_awaited, references), return_exceptions=True)
        errors = [r for r in results if isinstance(r, BaseException)]
        for error in errors:
            if isinstance(error, ray.exceptions.RayActorError):
                raise GroupDied(f"a rank died: {str(error).splitlines()[0]}") from error
        for error in errors:
            raise error
        return list(results)


async def _awaited(reference: Any) -> Any:
    try:
        return await asyncio.wrap_future(reference.future())
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, PassFailed | WindowIncomplete):
            raise error.cause from error
        raise


def _nothing(_: list[Any]) -> None:
    return None


def _first_error(parts: list[str | None]) -> str | None:
    if None in parts:
        return None
    return next((error for error in parts if error), "")
