"""From an operation whose turn it is to work on the ranks, or to an outcome without them.

Everything that can be refused is refused here, for that operation alone, before a rank hears of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from actors.contract import PassFailed, StepOutput, TenantConfig
from actors.group import MegatronGroup, RequestOutput
from actors.packing import PackedRequest, PackingConfig, pack
from bus.blobs import BlobLost
from bus.errors import CodecError
from bus.events import (
    CreateModel,
    Failed,
    ForwardBackward,
    LoadWeights,
    ModelUnloaded,
    Op,
    OptimStep,
    Outcome,
    Refused,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    UnloadModel,
)
from bus.ledger import LedgerRow
from bus.log import LogEntry
from runtime import checks, entries, outcomes
from runtime.checkpoints import manifest
from runtime.checkpoints.loading import CheckpointGone, Found, Loading
from runtime.checkpoints.saving import Saving
from runtime.checks import Refusal
from runtime.config import Settings
from runtime.job import Job
from runtime.lost_calls import LostCalls
from runtime.passes import Passes
from runtime.sequencer import GAP, Turn

log = logging.getLogger(__name__)

T = TypeVar("T")

Told = tuple[LedgerRow, Outcome]
"""What became of an operation in an earlier life."""

LARGE_BODY = 64 * 1024
"""Bodies above this are decoded and checked in a thread, so that the event loop stays free."""


def packing(settings: Settings) -> PackingConfig:
    return PackingConfig(
        settings.packing.max_tokens_per_microbatch, settings.packing.max_datums_per_microbatch
    )


class HandOver:
    """Decides each turn of one group's life."""

    def __init__(
        self,
        settings: Settings,
        group: MegatronGroup,
        whole: Callable[[LogEntry], Awaitable[LogEntry]],
        told: Callable[[LogEntry], Awaitable[Told | None]],
        saving: Saving,
        loading: Loading,
    ) -> None:
        """`whole` brings the body of an entry whose body is stored apart. Raises BlobLost.

        `told`: what became of an entry in an earlier life; None for one that had no result yet.
        """
        self._settings = settings
        self._whole = whole
        self._told = told
        self._saving = saving
        self._loading = loading
        self._spec = group.spec
        self._passes = Passes(group)
        self._packing = packing(settings)
        self.lost = LostCalls()
        self._live: dict[str, TenantConfig] = {}
        self._not_created: dict[str, str] = {}
        self._lost_models: dict[str, str] = {}
        self._ended: set[str] = set()

    def config(self, model_id: str) -> TenantConfig | None:
        """What a model that is in the ranks' hands trains."""
        return self._live.get(model_id)

    def resume(self, model_id: str, config: TenantConfig) -> None:
        """The ranks have the model from a snapshot."""
        self._live[model_id] = config

    def lose(self, model_id: str, because: str) -> None:
        """The model's state is lost; its operations fail with `because`."""
        self._lost_models[model_id] = because
        self._live.pop(model_id, None)

    def flush(self) -> None:
        """Hand to the ranks whatever had its turn."""
        self._passes.flush()

    async def begin(self, job: Job, turn: Turn, given_up: int = 0) -> None:
        """Set the job's outcome, or hand it to the ranks. Never raises for what a user sent; raises GroupDied.

        `given_up`: how often it took the ranks down; if at all, it does not go there again.
        """
        entry = whole = turn.entry
        job.loses_gradient = entry.verb == "forward_backward"
        try:
            if turn.lost is not None:
                job.outcome = outcomes.behind_gap(turn.lost)
                if entry.verb == "optim_step" and entry.model_id in self._live:
                    self._end_window(job)
            elif entry.model_id in self._ended:
                job.outcome = outcomes.unloaded(entry.model_id)
            elif entry.model_id in self._not_created and entry.seq_id is not None:
                job.outcome = outcomes.not_created(entry.model_id, self._not_created[entry.model_id])
            elif entry.model_id in self._lost_models and entry.seq_id is not None:
                job.outcome = outcomes.model_lost(entry.model_id, self._lost_models[entry.model_id])
            else:
                whole = await self._whole(entry)
                op = await _beside(entry, whole.op)
                if given_up:
                    self._give_up(job, op, given_up)
                else:
                    await self._hand_over(job, op)
        except BlobLost as error:
            job.outcome = outcomes.body_lost(str(error))
        except CodecError as error:
            if job.loses_gradient and entries.only_scores(whole):
                job.loses_gradient, job.verb = False, "forward"
            job.outcome = Failed(error=str(error), category="user", field=error.field)
        except Refusal as refusal:
            job.outcome = outcomes.refused(refusal)
        if entry.seq_id == 0 and isinstance(job.outcome, Failed):
            self._not_created[entry.model_id] = job.outcome.error

    async def _hand_over(self, job: Job, op: Op) -> None:
        model_id = job.entry.model_id
        match op:
            case CreateModel(start=None):
                chosen = checks.training(op, self._settings)
                self._run(job, self._passes.group().create(model_id, chosen))
                self._live[model_id] = chosen
                job.finish = lambda _: outcomes.created(model_id, op)
            case ForwardBackward():
                job.loses_gradient = not op.forward_only
                job.verb = "forward" if op.forward_only else "forward_backward"
                request = await _beside(job.entry, lambda: self._packed(op))
                job.ranks = self._passes.forward_backward(model_id, request, _number(job.entry))
                job.finish = _scored
            case OptimStep():
                self._step(job, op)
            case SaveWeights() | SaveWeightsForSampler() | SaveWeightsExternal():
                if (told := await self._told(job.entry)) is not None:
                    _, job.outcome = told  # it changed nothing, so there is nothing to rebuild
                    return
                await self._saving.begin(job, op, self._live[model_id], self._passes.group)
                if job.ranks is not None:
                    self._passes.track(job.ranks)
            case LoadWeights() | CreateModel():
                await self._load(job, op)
            case UnloadModel():
                if model_id in self._live:
                    self._run(job, self._passes.group().unload(model_id))
                    del self._live[model_id]
                self._ended.add(model_id)
                self.lost.forget(model_id)
                job.outcome = ModelUnloaded(model_id=model_id)
            case Refused():
                job.verb = "refused"
                job.loses_gradient = op.verb in (None, GAP, "forward_backward")
                job.outcome = Failed(error=op.error, category="user", field=op.field)

    async def _load(self, job: Job, op: LoadWeights | CreateModel) -> None:
        """Rare enough to be waited for: what is decided after it knows whether it went well.

        In a replay it loads what it loaded before, or loses the model; it never goes on with other weights.
        """
        entry = job.entry
        told = await self._told(entry)
        if told is not None and told[0].outcome == "failed":
            _, job.outcome = told
            return
        url = told[0].loaded if told is not None else None
        try:
            found = await self._find(entry, op, url)
            await self._at_ranks(job, op, found)
        except (CheckpointGone, PassFailed, Refusal) as error:
            if told is None:
                if isinstance(error, Refusal):
                    raise
                job.outcome = outcomes.not_loaded(str(error))
                return
            _, job.outcome = told
            self._lose(job, str(error))

    def _lose(self, job: Job, error: str) -> None:
        """A replay cannot load what was loaded: there is no way to the state that the model had."""
        model_id = job.entry.model_id
        because = f"seq_id {job.entry.seq_id} loaded a checkpoint that cannot be loaded again: {error}"
        log.error("model %s is lost: %s", model_id, because)
        if model_id in self._live:
            self._run(job, self._passes.group().unload(model_id))
        self.lose(model_id, because)

    async def _find(self, entry: LogEntry, op: LoadWeights | CreateModel, url: str | None) -> Found:
        checkpoint = op.checkpoint if isinstance(op, LoadWeights) else op.start
        assert checkpoint is not None
        return await self._loading.find(entry.tenant, checkpoint, url)

    async def _at_ranks(self, job: Job, op: LoadWeights | CreateModel, found: Found) -> None:
        entry, model_id = job.entry, job.entry.model_id
        async with self._loading.files(found) as folder:
            if isinstance(op, LoadWeights):
                self._loading.check(found, self._live[model_id])
                optimizer = op.checkpoint.optimizer
                loading = self._passes.group().load(model_id, folder, optimizer=optimizer)
                self._passes.track(loading)
                await loading
                assert entry.position is not None
                # Whatever the window had lost went with it.
                self.lost.settle(model_id, _number(entry), entry.position)
                job.outcome = outcomes.loaded(op.checkpoint.path, model_id)
            else:
                assert op.start is not None
                chosen = self._loading.training(found, op, self._settings)
                loading = self._passes.group().create_from(
                    model_id, chosen, folder, optimizer=op.start.optimizer
                )
                self._passes.track(loading)
                await loading
                self._live[model_id] = chosen
                name = self._settings.served_name
                job.outcome = outcomes.created_from(model_id, name, manifest.lora(chosen))
        job.loaded = found.url

    def _give_up(self, job: Job, op: Op, tries: int) -> None:
        """What it would have changed stays, except that a step ends its window all the same."""
        model_id = job.entry.model_id
        job.outcome = outcomes.given_up(tries)
        match op:
            case ForwardBackward():
                job.loses_gradient = not op.forward_only
                job.verb = "forward" if op.forward_only else "forward_backward"
            case OptimStep():
                self._end_window(job)
            case UnloadModel():
                self._live.pop(model_id, None)
                self._ended.add(model_id)
                self.lost.forget(model_id)

    def _end_window(self, job: Job) -> None:
        """As the step does that this one would have been; what it was to consume is not for the next one."""
        entry = job.entry
        assert entry.position is not None
        self.lost.settle(entry.model_id, _number(entry), entry.position)
        self._run(job, self._passes.group().clear_window(entry.model_id))

    def _run(self, job: Job, operation: asyncio.Task[Any]) -> None:
        self._passes.track(operation)
        job.ranks = operation

    def _packed(self, op: ForwardBackward) -> PackedRequest:
        batch = checks.batch(op, self._spec, self._settings)
        return pack(batch.tokens, batch.request, self._packing, forward_only=op.forward_only)

    def _step(self, job: Job, op: OptimStep) -> None:
        adam = checks.adam_params(op.adam_params)
        entry = job.entry
        assert entry.position is not None
        verdict = self.lost.settle(entry.model_id, _number(entry), entry.position)
        if verdict.lost is None:
            self._run(job, self._passes.group().optim_step(entry.model_id, adam, verdict.known))
            job.finish = _stepped
        else:
            self._run(job, self._passes.group().clear_window(entry.model_id))
            job.outcome = outcomes.step_lost(verdict.lost)


def _scored(output: RequestOutput) -> Outcome:
    return outcomes.forward_backward_done(output)


def _stepped(output: StepOutput) -> Outcome:
    return outcomes.optim_step_done(output)


def _number(entry: LogEntry) -> int:
    assert entry.seq_id is not None, "only unload_model has no number"
    return entry.seq_id


async def _beside(entry: LogEntry, work: Callable[[], T]) -> T:
    """`work` for this entry: at once when it is small, in a thread when it would hold up the event loop."""
    if entry.size <= LARGE_BODY:
        return work()
    return await asyncio.to_thread(work)
