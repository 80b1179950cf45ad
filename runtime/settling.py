"""Writing down what became of an operation: its result, its ledger row, its model's row, its metrics.

An operation has exactly one result. When a replay comes to another one than was published, the first one stands,
and the difference is counted and logged.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any, Literal

import msgspec

from bus import codec
from bus.events import (
    Failed,
    ForwardBackwardDone,
    ModelCreated,
    ModelUnloaded,
    OptimStepDone,
    Outcome,
    Result,
)
from bus.lease import Lease
from bus.ledger import LedgerRow
from bus.log import LogEntry
from bus.results import Published
from bus.tables import ModelRow
from observability.training import record_forward_backward, record_optim_step
from runtime import outcomes
from runtime.job import Job
from runtime.services import Services, patiently

log = logging.getLogger(__name__)


class Settling:
    """The writing half of one group's life."""

    def __init__(self, services: Services, lease: Lease) -> None:
        self._s = services
        self._lease = lease
        self._known: dict[tuple[str, int | None], LedgerRow] = {}

    def replays(self, entry: LogEntry, row: LedgerRow) -> None:
        """The entry had its outcome before this life began."""
        self._known[entry.model_id, entry.seq_id] = row

    async def told(self, entry: LogEntry) -> tuple[LedgerRow, Outcome] | None:
        """What an entry that is not to run again came to in an earlier life; None where it had no result yet."""
        if not self.had_its_result(entry):
            return None
        row = self._known[entry.model_id, entry.seq_id]
        found = await self._s.results.get(entry.tenant, entry.model_id, entry.seq_id)
        if found is None:
            return row, outcomes.told_before(row.outcome, entry.seq_id)
        return row, found.result().outcome

    def given_up(self, entry: LogEntry) -> int:
        """How often the entry took the ranks down, where it must not run again; else 0."""
        row = self._known.get((entry.model_id, entry.seq_id))
        return row.given_up if row is not None else 0

    async def horizon(self, job: Job) -> int:
        """The log's last position when this job's failure became known; the same in every replay."""
        entry = job.entry
        row = self._known.get((entry.model_id, entry.seq_id))
        if row is not None and row.horizon is not None:
            return row.horizon
        horizon = await patiently(self._s.log.last_position)
        await self._lease.confirm()
        await self._record(entry, "failed", horizon)
        return horizon

    async def settle(self, job: Job, outcome: Outcome) -> None:
        """Publish the outcome, and everything that has to be true before or after somebody reads it.

        Raises LeaseLost, having written nothing, where another dispatcher acts for the group.
        """
        entry = job.entry
        ranks_done = time.monotonic()
        await self._lease.confirm()
        if entry.seq_id == 0:
            await self._begin_model(entry.model_id, outcome)
        published = await patiently(lambda: self._publish(entry, outcome))
        if self.had_its_result(entry):
            self._count_replay(entry, published)
        elif self.given_up(entry):
            if published is Published.NEW:
                self._measure(job, outcome, ranks_done)
        else:
            if not isinstance(outcome, Failed) or not job.loses_gradient:  # else `horizon` has recorded it
                kind: Literal["done", "failed"] = "failed" if isinstance(outcome, Failed) else "done"
                await self._record(entry, kind, loaded=job.loaded)
            self._measure(job, outcome, ranks_done)
        if isinstance(outcome, ModelUnloaded):
            self._s.recorder.remove(model=entry.model_id)
            await self._set_status(entry.model_id, "unloaded")
            await patiently(lambda: self._s.log.forget(entry.model_id))

    def had_its_result(self, entry: LogEntry) -> bool:
        """What is given up is written down first, and gets its result in the life that follows."""
        return (entry.model_id, entry.seq_id) in self._known and not self.given_up(entry)

    async def _publish(self, entry: LogEntry, outcome: Outcome) -> Published:
        if (
            self.had_its_result(entry)
            and await self._s.results.get(entry.tenant, entry.model_id, entry.seq_id) is None
        ):
            return Published.SAME  # it was published once, and has expired since
        result = Result(
            request_id=entry.request_id, model_id=entry.model_id, seq_id=entry.seq_id, outcome=outcome
        )
        published = await self._s.results.publish(entry.tenant, result, _answered_in(entry, outcome))
        if published is Published.NEW:
            self._s.recorder.inc("tinkerbus_bus_published_messages_total", stream="results")
        return published

    def _count_replay(self, entry: LogEntry, published: Published) -> None:
        self._s.recorder.inc("tinkerbus_replayed_operations_total")
        if published is Published.DIFFERENT:
            self._s.recorder.inc("tinkerbus_replay_mismatches_total")
            log.error("the replay of %s differs from the result that was published", entry.request_id)

    def _measure(self, job: Job, outcome: Outcome, ranks_done: float) -> None:
        recorder, model_id = self._s.recorder, job.entry.model_id
        label = "done"
        if isinstance(outcome, Failed):
            label = "failed_user" if outcome.category == "user" else "failed_server"
        recorder.inc("tinkerbus_operations_total", verb=job.verb, outcome=label)
        stages = {
            "queue": job.started - job.accepted,
            "ranks": ranks_done - job.started,
            "total": time.monotonic() - job.accepted,
        }
        for stage, seconds in stages.items():
            recorder.observe("tinkerbus_operation_duration_seconds", seconds, verb=job.verb, stage=stage)
        if isinstance(outcome, ForwardBackwardDone):
            forward_only = job.verb == "forward"
            record_forward_backward(recorder, outcome.metrics, model=model_id, forward_only=forward_only)
        elif isinstance(outcome, OptimStepDone):
            record_optim_step(
                recorder,
                model=model_id,
                gradient_norm=outcome.metrics["grad_norm"],
                window_calls=int(outcome.metrics["window_calls"]),
                window_tokens=int(outcome.metrics["window_tokens"]),
                finalizations=int(outcome.metrics["finalizations"]),
                skipped=bool(outcome.metrics["skipped"]),
            )

    async def _record(
        self,
        entry: LogEntry,
        kind: Literal["done", "failed"],
        horizon: int | None = None,
        loaded: str | None = None,
    ) -> None:
        position = entry.position
        assert position is not None
        await patiently(
            lambda: self._s.ledger.record(
                entry.model_id, entry.seq_id, entry.body_hash, kind, position, horizon, loaded=loaded
            )
        )

    async def _begin_model(self, model_id: str, outcome: Outcome) -> None:
        """Of a model made from a checkpoint, what it is shows only now."""
        if not isinstance(outcome, ModelCreated):
            await self._set_status(model_id, "failed")
            return
        self._s.recorder.begin(model=model_id)
        await self._set_status(model_id, "live", base_model=outcome.base_model, lora=outcome.lora)

    async def _set_status(
        self, model_id: str, status: Literal["live", "failed", "unloaded"], **fields: Any
    ) -> None:
        def changed(row: ModelRow) -> ModelRow:
            return row if row.status == "unloaded" else msgspec.structs.replace(row, status=status, **fields)

        await patiently(lambda: self._s.tables.models.change(model_id, changed))


async def give_up(services: Services, entry: LogEntry, tries: int) -> None:
    """Write down that the entry never runs again, for every life to come. Its result follows in the next one."""
    assert entry.position is not None
    position, horizon = entry.position, await patiently(services.log.last_position)
    await patiently(
        lambda: services.ledger.record(
            entry.model_id, entry.seq_id, entry.body_hash, "failed", position, horizon, tries
        )
    )


def _answered_in(entry: LogEntry, outcome: Outcome) -> str:
    """The content type of the request, except where the metrics hold what JSON has no word for."""
    if entry.content_type != codec.JSON:
        return codec.MSGPACK
    if isinstance(outcome, ForwardBackwardDone | OptimStepDone) and not all(
        map(math.isfinite, outcome.metrics.values())
    ):
        return codec.MSGPACK
    return codec.JSON
