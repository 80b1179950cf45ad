"""One life of a group: the log from its start, through the sequencer and the ranks, to results.

Reading, taking turns and publishing run side by side, so that the ranks always have the next operation queued while
the current one runs. What stood on the log when the life began is a replay: it runs again to rebuild the ranks'
state, and its results are compared with those already published.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

from actors.group import GroupDied, MegatronGroup
from actors.window import PassFailed, WindowIncomplete
from bus import codec
from bus.events import Failed, Refused
from bus.log import BodyConflict, LogEntry
from bus.log import entry as log_entry
from runtime import outcomes
from runtime.hand_over import HandOver
from runtime.job import Job
from runtime.sequencer import GAP, Sequencer, Turn
from runtime.services import Services, patiently
from runtime.settling import Settling
from runtime.unfinished import Unfinished, report

log = logging.getLogger(__name__)

DEPTH = 8
"""Operations between their turn and their result at a time. Two keep the ranks busy; of more, requests may go in one
pass, and slow publishing is absorbed."""


class Pipeline:
    """See the module. `run` goes on until it is cancelled or the group dies."""

    def __init__(self, services: Services, group: MegatronGroup) -> None:
        self._s = services
        self._hand_over = HandOver(services.settings, group, self._whole)
        self._sequencer = Sequencer()
        self._settling: Settling
        self._accepted: dict[str, dict[int | None, float]] = {}
        """Per model: when each operation that waits was read."""
        self._last_accepted: dict[str, float] = {}
        self._unfinished = Unfinished()
        self._running: dict[str, Job] = {}
        self._wake = asyncio.Event()
        self._slots = asyncio.Semaphore(DEPTH)
        self._replay_to = 0
        self.position = 0
        """Of the last entry read."""
        self.end_of_log = 0
        """As last asked, once a second."""
        self.caught_up = asyncio.Event()
        """Set once everything that was on the log at the start has its result."""

    async def run(self) -> None:
        """Raises GroupDied when a rank is lost."""
        self._replay_to = await self._s.log.last_position()
        known = await self._s.ledger.load()
        self._settling = Settling(self._s, known)
        rows = await self._s.tables.models.all()
        done_with = {str(model_id) for model_id, row in rows.items() if row.status == "unloaded"}
        await patiently(lambda: self._s.log.forget_all(done_with))
        settled = {key for key in known if key[0] in done_with}
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(settled, known.keys()))
                tasks.create_task(
                    report(self._s.tables.backlogs, self._s.log.group, self._unfinished, self._has_read_all)
                )
                tasks.create_task(self._watch_gaps())
                tasks.create_task(self._report_replay())
                tasks.create_task(self._watch_end())
                await self._take_turns(tasks)
        except ExceptionGroup as failures:
            if died := failures.subgroup(GroupDied):
                raise GroupDied("a rank died") from died
            raise

    def unfinished(self) -> dict[str, list[float]]:
        """Per model: `time.monotonic()` of acceptance of each operation without a result."""
        found = {model_id: list(times.values()) for model_id, times in self._accepted.items()}
        for job in self._running.values():
            if job.entry.seq_id is not None:  # a model that is being unloaded has no queue any more
                found.setdefault(job.entry.model_id, []).append(job.accepted)
        return found

    async def _whole(self, entry: LogEntry) -> LogEntry:
        return await patiently(lambda: self._s.log.whole(entry))

    def _has_read_all(self) -> bool:
        """Whether everything that was on the log at the start is counted."""
        return self.position >= self._replay_to

    async def _read(
        self, settled: set[tuple[str, int | None]], known: Collection[tuple[str, int | None]]
    ) -> None:
        """`settled`: operations of models that ended before this life; their state is not needed any more.

        `known`: operations that have their result, and run again.
        """
        async for entry in self._s.log.read(1):
            assert entry.position is not None
            self.position = entry.position
            self._s.recorder.inc("tinkerbus_bus_consumed_messages_total", stream="ops")
            waits = (entry.model_id, entry.seq_id) not in known and not self._sequencer.ended(entry.model_id)
            self._unfinished.read(entry, waits=waits)
            if (entry.model_id, entry.seq_id) not in settled:
                now = time.monotonic()
                self._accepted.setdefault(entry.model_id, {})[entry.seq_id] = now
                self._last_accepted[entry.model_id] = now
                self._sequencer.offer(entry)
            self._wake.set()

    async def _take_turns(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            self._wake.clear()
            turn = self._sequencer.next_turn()
            if turn is None:
                if self.position >= self._replay_to and not self._running:
                    self.caught_up.set()
                await self._wake.wait()
                continue
            await self._slots.acquire()
            job = await self._begin(turn)
            self._running[job.entry.request_id] = job
            tasks.create_task(self._complete(job))

    async def _begin(self, turn: Turn) -> Job:
        entry, now = turn.entry, time.monotonic()
        accepted = self._accepted.get(entry.model_id, {}).pop(entry.seq_id, now)
        verb = "refused" if entry.verb == GAP else entry.verb
        job = Job(entry, verb, accepted, now)
        await self._hand_over.begin(job, turn)
        if isinstance(job.outcome, Failed):
            await self._note_failure(job)
        return job

    async def _complete(self, job: Job) -> None:
        try:
            if job.ranks is not None:
                try:
                    answer = await job.ranks
                    if job.finish is not None:
                        job.outcome = job.finish(answer)
                except WindowIncomplete as error:
                    job.outcome = outcomes.step_lost(error.label)
                except PassFailed as error:
                    job.outcome = outcomes.failed_on_ranks(error)
                    await self._note_failure(job)
            assert job.outcome is not None, "an operation has an outcome, or the ranks' answer gives one"
            if job.entry.seq_id is None:
                self._accepted.pop(job.entry.model_id, None)
                self._last_accepted.pop(job.entry.model_id, None)
            await self._settling.settle(job, job.outcome)
            self._unfinished.finish(job.entry)
        finally:
            del self._running[job.entry.request_id]
            self._slots.release()
            self._wake.set()

    async def _note_failure(self, job: Job) -> None:
        """A gradient is missing from the window: the step behind it has to know."""
        if job.loses_gradient and job.entry.seq_id is not None:
            horizon = await self._settling.horizon(job)
            self._hand_over.lost.add(job.entry.model_id, job.entry.seq_id, horizon)

    async def _watch_gaps(self) -> None:
        """Give up on numbers that do not come, by writing so onto the log in their place."""
        timeout_s = self._s.settings.gap_timeout_s
        await self.caught_up.wait()
        while True:
            await asyncio.sleep(min(1.0, timeout_s / 4))
            for model_id, seq_id in self._sequencer.missing().items():
                if time.monotonic() - self._last_accepted[model_id] >= timeout_s:
                    await patiently(lambda m=model_id, n=seq_id: self._give_up(m, n))  # type: ignore[misc]

    async def _give_up(self, model_id: str, seq_id: int) -> None:
        found = await self._s.tables.models.get(model_id)
        if found is None:
            return
        error = outcomes.gap(seq_id, self._s.settings.gap_timeout_s).error
        body = codec.encode(Refused(error=error, verb=GAP))
        try:
            await self._s.log.append(log_entry(found[0].tenant, model_id, seq_id, GAP, body))
        except BodyConflict:
            return  # it came after all, just now
        log.warning("model %s: %s", model_id, error)

    async def _watch_end(self) -> None:
        while True:
            self.end_of_log = await patiently(self._s.log.last_position)
            await asyncio.sleep(1)

    async def _report_replay(self) -> None:
        """One line every few seconds while old operations run again."""
        if self._replay_to == 0:
            return
        started = time.monotonic()
        while True:
            try:
                await asyncio.wait_for(self.caught_up.wait(), 5)
            except TimeoutError:
                log.warning("replaying the log: position %d of %d", self.position, self._replay_to)
            else:
                log.info(
                    "replayed the log to position %d in %.1f s", self._replay_to, time.monotonic() - started
                )
                return
