"""One life of a group: snapshots, then the log behind them, through the sequencer and the ranks, to results.

Reading, taking turns and publishing run side by side, so that the ranks always have the next operation queued while
the current one runs. What stood on the log when the life began is a replay: it runs again to rebuild the ranks'
state, and its results are compared with those already published.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable

from actors.group import GroupDied, MegatronGroup
from bus import codec
from bus.events import Failed, ModelUnloaded, Outcome, Refused
from bus.lease import Lease, LeaseLost
from bus.log import BodyConflict, LogEntry
from bus.log import entry as log_entry
from runtime import outcomes, snapshots, upkeep
from runtime.checkpoints.keeping import Keeping
from runtime.checkpoints.loading import Loading
from runtime.checkpoints.saving import Base, Saving
from runtime.checkpoints.store import Store
from runtime.hand_over import HandOver, answered
from runtime.job import Job
from runtime.pace import Pace
from runtime.passes import MOST_TOGETHER
from runtime.recovery import Recovery
from runtime.sequencer import GAP, Sequencer, Turn
from runtime.services import Services, patiently
from runtime.settling import Settling
from runtime.snapshots import Snapshots
from runtime.snapshotting import Snapshotting
from runtime.unfinished import Unfinished, report

log = logging.getLogger(__name__)

DEPTH = 16
"""Operations between their turn and their result at a time. Two keep the ranks busy; of more, requests may go in one
pass, and slow publishing is absorbed."""
PASSES = ("forward", "forward_backward")
DROP_EVERY_S = 600.0
"""How often to look for models that ended and whose results have expired."""


class Pipeline:
    """See the module. `run` goes on until it is cancelled or the group dies."""

    def __init__(
        self,
        services: Services,
        lease: Lease,
        group: MegatronGroup,
        kept: Snapshots,
        bits: dict[str, str],
        checkpoints: Store,
        base: Base,
        *,
        cautious: bool = False,
    ) -> None:
        """`bits`: what they depend on here and now, see `runtime.fingerprint`. `cautious`: replay operations one by
        one, so that it is known which of them takes the ranks down.
        """
        self._s = services
        self._lease = lease
        self._group = group
        self._snapshots = kept
        self._fingerprint = bits
        self._snapshotting = Snapshotting(services, lease, group, kept)
        self._pace = Pace()
        self._settling = Settling(services, lease)
        saving = Saving(services, lease, group, checkpoints, base)
        loading = Loading(services.tables.checkpoints, checkpoints, base.identity, saving.over)
        self._hand_over = HandOver(
            services.settings, group, self._whole, self._settling.told, saving, loading
        )
        self._keeping = Keeping(services, lease, checkpoints)
        self._sequencer = Sequencer()
        self._loads: dict[str, Job] = {}
        """Per model: its newest load, while that has no result yet."""
        self._accepted: dict[str, dict[int | None, float]] = {}
        """Per model: when each operation that waits was read."""
        self._last_accepted: dict[str, float] = {}
        self._unfinished = Unfinished()
        self._running: dict[str, Job] = {}
        self._wake = asyncio.Event()
        self._slots = asyncio.Semaphore(1 if cautious else DEPTH)
        self.cautious = cautious
        """Operations run one by one for now."""
        self.suspect: LogEntry | None = None
        """What the ranks were at, or were to do next, when one died."""
        self._replay_to = 0
        self.position = 0
        """Of the last entry that the sequencer has, or has no use for."""
        self.end_of_log = 0
        """As last asked, once a second."""
        self.caught_up = asyncio.Event()
        """Set once everything that was on the log at the start has its result."""

    async def run(self) -> None:
        """Raises LeaseLost, GroupDied; FingerprintDiffers where snapshots do not fit this machine."""
        self._replay_to = await patiently(self._s.log.last_position)
        recovery = Recovery(self._s, self._group, self._snapshots, self._fingerprint)
        done_with = await recovery.resume(self._sequencer, self._hand_over)
        await patiently(lambda: self._s.log.forget_all(done_with))
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(done_with))
                tasks.create_task(
                    report(self._s.tables.backlogs, self._s.log.group, self._unfinished, self._has_read_all)
                )
                tasks.create_task(self._watch_gaps())
                tasks.create_task(self._report_replay())
                tasks.create_task(self._watch_end())
                tasks.create_task(self._drop_ended())
                tasks.create_task(self._keep_checkpoints())
                await self._take_turns(tasks)
        except ExceptionGroup as failures:
            if lost := failures.subgroup(LeaseLost):
                raise LeaseLost("another dispatcher acts for the group") from lost
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

    async def _read(self, done_with: set[str]) -> None:
        """`done_with`: models that ended before this life; what they had done is not needed any more."""
        async for entry in self._s.log.read(1):
            assert entry.position is not None
            self._s.recorder.inc("tinkerbus_bus_consumed_messages_total", stream="ops")
            news = await self._is_news(entry, done_with)
            self._unfinished.read(entry, waits=news and not self._settling.had_its_result(entry))
            if news:
                now = time.monotonic()
                self._accepted.setdefault(entry.model_id, {})[entry.seq_id] = now
                self._last_accepted[entry.model_id] = now
                self._sequencer.offer(entry)
            self.position = entry.position
            self._wake.set()

    async def _is_news(self, entry: LogEntry, done_with: set[str]) -> bool:
        """Whether the ranks' state needs it, or its sender an answer."""
        assert entry.position is not None
        if self._sequencer.taken(entry.model_id, entry.seq_id):
            return False
        if entry.position > self._replay_to:
            return True
        row = await patiently(lambda: self._s.ledger.find(entry.model_id, entry.seq_id))
        if row is None:
            return True
        self._settling.replays(entry, row)
        return entry.model_id not in done_with

    async def _take_turns(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            self._wake.clear()
            if not self.caught_up.is_set() and self._has_caught_up():
                self._all_is_replayed()
            if room_in := self._pace.room_in(time.monotonic()):
                await _at_most(self._wake.wait(), room_in)
                continue
            turn = self._sequencer.next_turn()
            if turn is None:
                await self._wake.wait()
                continue
            await self._slots.acquire()
            await self._lease.confirm()
            with self._hand_over.together():
                first, others = await self._start(turn, tasks), list[LogEntry]()
                while (entry := self._goes_along(first, others)) is not None:
                    await self._slots.acquire()
                    await self._start(self._sequencer.follow(entry.model_id), tasks)
                    others.append(entry)
            self._snapshot_when_due(tasks)

    async def _start(self, turn: Turn, tasks: asyncio.TaskGroup) -> Job:
        job = await self._begin(turn)
        self._running[job.entry.request_id] = job
        if job.loaded is not None:
            self._keep_what_was_loaded(tasks, job)
        tasks.create_task(self._complete(job))
        return job

    def _goes_along(self, first: Job, others: list[LogEntry]) -> LogEntry | None:
        """The model's next request, where it goes in one pass with those that have just had their turn."""
        if first.ranks is None or first.verb not in PASSES or self._slots.locked():
            return None
        entry = self._sequencer.ahead(first.entry.model_id)
        if entry is None or entry.verb != "forward_backward" or 1 + len(others) == MOST_TOGETHER:
            return None
        return entry if self._pace.goes_along(first, others, entry) else None

    def _snapshot_when_due(self, tasks: asyncio.TaskGroup) -> None:
        """Between two turns: what the ranks have been given is then what the sequencer has given out."""
        model_id = self._snapshotting.due()
        if model_id is not None:
            self._snapshot(tasks, model_id)

    def _keep_what_was_loaded(self, tasks: asyncio.TaskGroup, job: Job) -> None:
        """Tell of a load, and of what was computed behind it, once a replay needs its checkpoint no more.

        If the snapshot cannot be written, the checkpoint is what a replay has, for as long as it is there.
        """
        outcome, written = job.outcome, self._snapshot(tasks, job.entry.model_id)
        assert outcome is not None
        told = outcome

        async def after() -> Outcome:
            if written is not None:
                await written.wait()
            return told

        job.outcome, job.after = None, after
        self._loads[job.entry.model_id] = job

    def _snapshot(self, tasks: asyncio.TaskGroup, model_id: str) -> asyncio.Event | None:
        """Begin one of a model that is in the ranks' hands; set once the ranks' files are there, or never will be."""
        config = self._hand_over.config(model_id)
        if config is None:
            return None
        self._hand_over.flush()
        manifest = snapshots.manifest(
            model_id,
            config,
            self._sequencer.state(model_id, self.position),
            self._hand_over.lost.state(model_id),
            self._fingerprint,
        )
        under_way = [job for job in self._running.values() if job.entry.model_id == model_id]
        return self._snapshotting.take(tasks, manifest, under_way)

    def _has_caught_up(self) -> bool:
        """What came since may well be waiting: busy clients never leave the ranks without work."""
        if self.position < self._replay_to or self._sequencer.ready_up_to(self._replay_to):
            return False
        return all((job.entry.position or 0) > self._replay_to for job in self._running.values())

    def _all_is_replayed(self) -> None:
        self.caught_up.set()
        if self.cautious:
            self.cautious = False
            for _ in range(DEPTH - 1):
                self._slots.release()

    async def _begin(self, turn: Turn) -> Job:
        entry, now = turn.entry, time.monotonic()
        accepted = self._accepted.get(entry.model_id, {}).pop(entry.seq_id, now)
        verb = "refused" if entry.verb == GAP else entry.verb
        job = Job(entry, verb, accepted, now, behind=self._told_before(entry))
        try:
            await self._hand_over.begin(job, turn, self._settling.given_up(entry))
        except GroupDied:
            self.suspect = self.suspect or self._first_at_ranks() or entry
            raise
        if job.ranks is not None:
            # At once: whose turn is next is decided while this one runs.
            job.charged_s = self._pace.handed_over(job, time.monotonic())
            self._sequencer.charge(entry.tenant, job.charged_s)
        if isinstance(job.outcome, Failed):
            await self._note_failure(job)
        return job

    def _told_before(self, entry: LogEntry) -> list[Job]:
        if entry.seq_id is None:
            return [job for job in self._running.values() if job.entry.model_id == entry.model_id]
        load = self._loads.get(entry.model_id)
        return [] if load is None else [load]

    async def _complete(self, job: Job) -> None:
        try:
            if job.ranks is not None:
                try:
                    await answered(job)
                except GroupDied:
                    self.suspect = self.suspect or self._first_at_ranks()
                    raise
                finally:
                    self._spent(job)
                if isinstance(job.outcome, Failed) and job.horizon is None:
                    await self._note_failure(job)
            for earlier in job.behind:
                await earlier.settled.wait()
            if job.after is not None and job.outcome is None:
                job.outcome = await job.after()
            assert job.outcome is not None, "an operation has an outcome, or the ranks' answer gives one"
            if job.entry.seq_id is None:
                self._accepted.pop(job.entry.model_id, None)
                self._last_accepted.pop(job.entry.model_id, None)
            await self._settling.settle(job, job.outcome)
            self._unfinished.finish(job.entry)
            job.settled.set()
            if self._loads.get(job.entry.model_id) is job:
                del self._loads[job.entry.model_id]
            if isinstance(job.outcome, ModelUnloaded):
                self._pace.forget(job.entry.model_id)
                await self._snapshotting.forget(job.entry.model_id)
        finally:
            del self._running[job.entry.request_id]
            self._slots.release()
            self._wake.set()

    def _first_at_ranks(self) -> LogEntry | None:
        """Of what was handed over and has no answer, the oldest."""
        for job in self._running.values():
            ranks = job.ranks
            if ranks is not None and not (ranks.done() and ranks.exception() is None):
                return job.entry
        return None

    def _spent(self, job: Job) -> None:
        """Count the ranks' time for an operation that they have just answered."""
        seconds = self._pace.answered(job, time.monotonic())
        self._sequencer.charge(job.entry.tenant, seconds - job.charged_s)
        if self._hand_over.config(job.entry.model_id) is not None:
            self._snapshotting.spent(job.entry.model_id, seconds)

    async def _note_failure(self, job: Job) -> None:
        """A gradient is missing from the window: the step behind it has to know."""
        if job.loses_gradient and job.entry.seq_id is not None:
            job.horizon = await self._settling.horizon(job)
            self._hand_over.lost.add(job.entry.model_id, job.entry.seq_id, job.horizon)

    async def _keep_checkpoints(self) -> None:
        await self.caught_up.wait()
        await self._keeping.run()

    async def _watch_gaps(self) -> None:
        """Give up on numbers that do not come, by writing so onto the log in their place."""
        timeout_s = self._s.settings.gap_timeout_s
        await self.caught_up.wait()
        while True:
            await asyncio.sleep(min(1.0, timeout_s / 4))
            for model_id, seq_id in self._sequencer.missing().items():
                if time.monotonic() - self._last_accepted[model_id] >= timeout_s:
                    await patiently(lambda m=model_id, n=seq_id: self._close_gap(m, n))  # type: ignore[misc]

    async def _close_gap(self, model_id: str, seq_id: int) -> None:
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

    async def _drop_ended(self) -> None:
        """What stands on the log and in the ledger of models that ended goes after their results."""
        await self.caught_up.wait()
        while True:
            for model_id in await patiently(lambda: upkeep.over(self._s)):
                await self._lease.confirm()
                await patiently(lambda m=model_id: upkeep.drop(self._s, m))  # type: ignore[misc]
            await asyncio.sleep(min(DROP_EVERY_S, self._s.settings.results.ttl_s))

    async def _watch_end(self) -> None:
        read_to = -1
        while True:
            self.end_of_log = await patiently(self._s.log.last_position)
            if read_to == self._s.log.read_to and not self._has_read_all():
                # What stood there last may be gone: trimmed, with all that came before it.
                await self._look_for_more()
            read_to = self._s.log.read_to
            await asyncio.sleep(1)

    async def _look_for_more(self) -> None:
        if not await patiently(self._s.log.has_more):
            self._replay_to = self.position
            self._wake.set()

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


async def _at_most(event: Awaitable[object], seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds if seconds < math.inf else None):
            await event
