"""When a model's snapshot is taken, and the way from the ranks' memory to a trimmed log.

A recovery repeats what the ranks did since the newest snapshots. When that would be more than the budget, the model
with most to repeat is next; one such snapshot is under way at a time. What was loaded from a checkpoint, which may be
gone by then, is never repeated if it can be helped: a snapshot follows at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from actors.group import GroupDied, MegatronGroup
from bus.events import Failed
from bus.lease import Lease, LeaseLost
from bus.tables import ModelRow
from runtime.job import Job
from runtime.services import Services, patiently
from runtime.snapshots import KEPT, Manifest, Snapshots, with_failures

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.1


class Snapshotting:
    """Of one life of a group."""

    def __init__(self, services: Services, lease: Lease, group: MegatronGroup, snapshots: Snapshots) -> None:
        self._s = services
        self._lease = lease
        self._group = group
        self._snapshots = snapshots
        self._to_repeat: dict[str, float] = {}
        """Per model, seconds of work on the ranks since its newest snapshot."""
        self._under_way: set[asyncio.Task[None]] = set()
        self._one_at_a_time = asyncio.Lock()
        """Held while a folder is renamed into its place, and older ones go."""

    def spent(self, model_id: str, seconds: float) -> None:
        """The ranks worked on the model for so long."""
        self._to_repeat[model_id] = self._to_repeat.get(model_id, 0.0) + seconds

    async def forget(self, model_id: str) -> None:
        """The model has ended."""
        self._to_repeat.pop(model_id, None)
        if self._under_way:  # one may be of this model, whose folder goes
            await asyncio.wait(set(self._under_way))
        await asyncio.to_thread(self._snapshots.forget, model_id)

    def due(self) -> str | None:
        """The model whose snapshot is to be taken now."""
        budget_s = self._s.settings.recovery.replay_budget_s
        if self._under_way or sum(self._to_repeat.values()) <= budget_s:
            return None
        return max(self._to_repeat, key=self._to_repeat.__getitem__)

    def take(self, tasks: asyncio.TaskGroup, manifest: Manifest, under_way: Sequence[Job]) -> asyncio.Event:
        """Hand the copying to the ranks at once; a task among `tasks` sees to the rest.

        What it returns is set once every rank's part is on the disk, or it is clear that it will not be.

        `under_way`: the model's operations without a result yet; the snapshot holds what they did, so it must not be
        there before their results are.
        """
        self._to_repeat.pop(manifest.model_id, None)
        written = asyncio.Event()
        try:
            aside = self._snapshots.begin(manifest.model_id)
        except OSError as error:
            self._count_failure(manifest.model_id, error)
            written.set()
            return written
        copying = self._group.snapshot(manifest.model_id, aside)
        task = tasks.create_task(self._finish(manifest, aside, copying, list(under_way), written))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return written

    async def _finish(
        self,
        manifest: Manifest,
        aside: Path,
        copying: asyncio.Task[None],
        under_way: list[Job],
        written: asyncio.Event,
    ) -> None:
        try:
            try:
                await copying
                await self._written(aside)
            finally:
                written.set()
            for job in under_way:
                await job.settled.wait()
            await self._lease.confirm()
            whole = with_failures(manifest, _failures(under_way))
            async with self._one_at_a_time:
                await asyncio.to_thread(self._snapshots.commit, aside, whole)
        except (GroupDied, LeaseLost):
            raise
        except Exception as error:
            self._count_failure(manifest.model_id, error)
            await asyncio.to_thread(self._snapshots.abandon, aside)
            return
        self._s.recorder.inc("tinkerbus_snapshots_total")
        await self._trim(manifest.model_id)

    async def _written(self, aside: Path) -> None:
        """Raises OSError where a rank could not write its part."""
        while True:
            outcome = await self._group.snapshot_written(aside)
            if outcome is not None:
                break
            await asyncio.sleep(LOOK_EVERY_S)
        if outcome:
            raise OSError(outcome)

    def _count_failure(self, model_id: str, error: Exception) -> None:
        """The state stays where it is, in memory and on the log; the next try comes with the next budget."""
        log.error("the snapshot of model %s failed: %s", model_id, error)
        self._s.recorder.inc("tinkerbus_snapshots_failed_total")

    async def _trim(self, model_id: str) -> None:
        """Drop from the log what not even the older of the snapshots needs."""
        kept = await asyncio.to_thread(self._snapshots.of, model_id)
        if len(kept) < KEPT:
            return
        lane = kept[-1].manifest.lane

        def changed(row: ModelRow) -> ModelRow:
            return msgspec.structs.replace(row, trimmed_below=max(lane.next_seq, row.trimmed_below))

        # First the row, which sends senders of old numbers to the ledger.
        await patiently(lambda: self._s.tables.models.change(model_id, changed))
        await patiently(lambda: self._s.log.trim(model_id, lane.log_from, lane.next_seq))


def _failures(jobs: list[Job]) -> dict[int, int]:
    """Of those that failed and took a gradient with them: number, and the log's end when it was known."""
    found = {}
    for job in jobs:
        if isinstance(job.outcome, Failed) and job.loses_gradient and job.entry.seq_id is not None:
            assert job.horizon is not None, "a failure's horizon is known before its result is"
            found[job.entry.seq_id] = job.horizon
    return found
