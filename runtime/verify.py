"""Running what stands on the log again, beside everything: does it come to what was published?

A model at a time, from its creation, or from the oldest snapshot that can be used where the log is trimmed, through
the dispatcher's own sequencer, checks and packing, on ranks of its own. Nothing is written: no lease, no entry, no
result, no ledger row, no snapshot, no checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field

from actors.contract import PassFailed
from actors.group import MegatronGroup
from bus import scan, subjects
from bus.blobs import BlobLost
from bus.connection import Bus
from bus.errors import CodecError, newer_format
from bus.events import FORMAT, Failed, Outcome
from bus.ledger import Ledger, LedgerRow
from bus.log import LogEntry, OpsLog
from bus.results import Results
from bus.tables import CHECKPOINTS, MODELS, CheckpointRow, GroupRow, ModelRow, Table, existing_table
from runtime import fingerprint, outcomes
from runtime.checkpoints.loading import Loading
from runtime.config import Settings
from runtime.fingerprint import FIXED, FingerprintDiffers
from runtime.hand_over import HandOver, answered
from runtime.job import Job
from runtime.log_view import NotThere
from runtime.sequencer import Sequencer, Turn
from runtime.snapshots import Snapshot, Snapshots
from runtime.verdicts import Checked, Difference, Verdict, differences

DEPTH = 8
"""Operations between their turn and their verdict at a time."""
WRITES = ("save_weights", "save_weights_for_sampler", "save_weights_external")
"""What these do is written outside the ranks, and leaves a model's state alone: they do not run again."""
CREATION = "creation"


@dataclass(frozen=True, slots=True)
class Sources:
    """What a verification reads; made by `open`."""

    log: OpsLog
    results: Results
    models: Table[ModelRow] | None
    groups: Table[GroupRow] | None
    ledger: Ledger | None
    checkpoints: Table[CheckpointRow] | None

    @classmethod
    async def open(cls, bus: Bus, group: str) -> Sources:
        """Raises NotThere for a broker that no service has used, BrokerUnreachable."""
        for stream in (subjects.OPS_STREAM, subjects.RESULTS_STREAM):
            if not await scan.exists(bus, stream):
                raise NotThere(f"the broker has no stream {stream}: no tinkerbus has run on it")
        return cls(
            log=OpsLog(bus, group),
            results=Results(bus),
            models=await existing_table(bus, MODELS, ModelRow),
            groups=await existing_table(bus, "tinker_groups", GroupRow),
            ledger=await Ledger.existing(bus, group),
            checkpoints=await existing_table(bus, CHECKPOINTS, CheckpointRow),
        )

    async def row(self, model_id: str) -> ModelRow | None:
        found = None if self.models is None else await self.models.get(model_id)
        return None if found is None else found[0]

    async def settled(self, entry: LogEntry) -> LedgerRow | None:
        return None if self.ledger is None else await self.ledger.find(entry.model_id, entry.seq_id)

    async def told(self, entry: LogEntry) -> tuple[LedgerRow, Outcome] | None:
        """What became of the entry; None where it has no result yet."""
        row = await self.settled(entry)
        if row is None:
            return None
        found = await self.results.get(entry.tenant, entry.model_id, entry.seq_id)
        if found is None:
            return row, outcomes.told_before(row.outcome, entry.seq_id)
        return row, found.result().outcome

    async def base_model(self) -> str | None:
        """The name of what the service serves, as its dispatcher said last."""
        found = None if self.groups is None else await self.groups.get(self.log.group)
        return None if found is None else found[0].base_model


@dataclass(frozen=True, slots=True)
class Plan:
    """One model, and from where its replay may begin."""

    model_id: str
    entries: int
    """Operations on the log."""
    from_creation: bool
    snapshots: tuple[Snapshot, ...] = ()
    """Where it does not begin at its creation: those to try, in order."""


def plan(model_id: str, row: ModelRow | None, numbers: set[int | None], kept: Sequence[Snapshot]) -> Plan:
    """From the creation where the log is whole, else from the oldest snapshot; `kept` has the newest first. Pure."""
    if 0 in numbers and (row is None or row.trimmed_below == 0):
        return Plan(model_id, len(numbers), from_creation=True)
    return Plan(model_id, len(numbers), from_creation=False, snapshots=tuple(reversed(kept)))


async def plans(sources: Sources, kept: Snapshots, model_id: str | None) -> tuple[list[Plan], list[Snapshot]]:
    """Of one model or of all that have operations on the log, in the order of their names; and all their snapshots.

    Raises NotThere, NewerFormat.
    """
    known = sorted(await sources.log.models())
    if model_id is not None and model_id not in known:
        raise NotThere(f"model {model_id!r} has no operations on the log: `tinkerbus log models` lists them")
    if not known:
        raise NotThere("the log is empty: there is nothing to verify")
    made: list[Plan] = []
    snapshots: list[Snapshot] = []
    for name in known if model_id is None else [model_id]:
        found = await asyncio.to_thread(kept.of, name)
        snapshots += found
        made.append(plan(name, await sources.row(name), await sources.log.numbers(name), found))
    return made, snapshots


def check_bits(kept: Sequence[Mapping[str, str]], now: Mapping[str, str], *, accept: bool) -> list[str]:
    """In what the fingerprints of snapshots differ from ours, in words; pure.

    Raises FingerprintDiffers unless that was accepted, and for another layout or model in any case.
    """
    words: dict[str, str] = {}
    for one in kept:
        words |= fingerprint.changes(dict(one), dict(now))
    for name in FIXED:
        if name in words:
            raise FingerprintDiffers(
                f"the snapshots are of another {name}: {words[name]}; give the settings that the service runs with"
            )
    if words and not accept:
        raise FingerprintDiffers(
            f"results are promised for the same bits alone: {'; '.join(words.values())}; "
            "--accept-new-bits compares them all the same"
        )
    return list(words.values())


@dataclass(slots=True)
class Progress:
    """Where one model's verification is."""

    begins: str = CREATION
    """Known once its first operation has its verdict."""
    because: str | None = None
    """Why the replay cannot go on."""
    waiting: dict[int | None, LogEntry] = field(default_factory=dict)
    """Read, and without a turn yet."""


class Verifier:
    """Over one group of ranks, which it leaves as it found them."""

    def __init__(
        self, settings: Settings, sources: Sources, group: MegatronGroup, loading: Loading | None = None
    ) -> None:
        """`loading` is for logs on which a checkpoint was loaded."""
        self._settings = settings
        self._sources = sources
        self._group = group
        self._loading = loading
        self._gone: str | None = None
        """Says which body was asked for and is not kept any more."""

    async def model(self, plan: Plan, progress: Progress) -> AsyncGenerator[Checked, None]:
        """The verdict on each of a model's operations, in the order of their turns.

        Raises GroupDied, BrokerUnreachable, NewerFormat.
        """
        sequencer, self._gone = Sequencer(), None
        hand_over = HandOver(
            self._settings, self._group, self._whole, self._sources.told, loading=self._loading
        )
        await self._begin_model(plan, progress, sequencer, hand_over)
        running: deque[asyncio.Task[Checked]] = deque()
        entries = self._sources.log.so_far(model_id=plan.model_id)
        try:
            async with contextlib.aclosing(entries):
                async for entry in entries:
                    if entry.format > FORMAT:
                        raise newer_format(entry.format, FORMAT)
                    if sequencer.taken(entry.model_id, entry.seq_id):
                        continue
                    progress.waiting[entry.seq_id] = entry
                    sequencer.offer(entry)
                    while progress.because is None and (turn := sequencer.next_turn()) is not None:
                        checking = await self._take(turn, progress, hand_over)
                        if checking is None:
                            break
                        running.append(checking)
                        while len(running) == DEPTH or (running and running[0].done()):
                            yield await running.popleft()
            hand_over.flush()
            while running:
                yield await running.popleft()
            for seq_id in sorted(progress.waiting, key=lambda n: (n is None, n)):
                yield await self._not_reached(progress.waiting[seq_id], progress, sequencer)
            if hand_over.config(plan.model_id) is not None:
                await self._group.unload(plan.model_id)
        finally:
            for task in running:
                task.cancel()

    async def _begin_model(
        self, plan: Plan, progress: Progress, sequencer: Sequencer, hand_over: HandOver
    ) -> None:
        if plan.from_creation:
            return
        progress.begins = "-"
        for found in plan.snapshots:
            manifest = found.manifest
            try:
                await self._group.restore(plan.model_id, manifest.config, found.folder)
            except PassFailed:
                continue  # a service that runs keeps newer ones instead
            sequencer.resume(plan.model_id, manifest.lane)
            hand_over.resume(plan.model_id, manifest.config)
            hand_over.lost.resume(plan.model_id, manifest.window)
            progress.begins = f"snapshot before {manifest.lane.next_seq}"
            return
        progress.because = "the log begins after its creation, and there is no snapshot that can be read"

    async def _whole(self, entry: LogEntry) -> LogEntry:
        try:
            return await self._sources.log.whole(entry)
        except BlobLost as error:
            self._gone = str(error)
            raise

    async def _take(
        self, turn: Turn, progress: Progress, hand_over: HandOver
    ) -> asyncio.Task[Checked] | None:
        """Hand the turn over; None where the replay cannot go on from here."""
        entry = turn.entry
        row = await self._sources.settled(entry)
        if entry.verb in WRITES and turn.lost is None:
            del progress.waiting[entry.seq_id]
            return asyncio.create_task(self._left_out(entry))
        job = Job(entry, entry.verb, 0.0, 0.0)
        await hand_over.begin(job, turn, row.given_up if row is not None else 0)
        if because := self._gone or hand_over.lost_because(entry.model_id):
            progress.because = because
            return None
        del progress.waiting[entry.seq_id]
        await self._note_failure(job, row, hand_over)
        if job.ranks is not None and row is not None and row.horizon is not None:
            await self._finish(job, row, hand_over)  # what comes next may depend on how it fails
        return asyncio.create_task(self._check(job, row, hand_over))

    async def _finish(self, job: Job, row: LedgerRow | None, hand_over: HandOver) -> None:
        if job.ranks is not None:
            hand_over.flush()
            await answered(job)
            job.ranks = None
            await self._note_failure(job, row, hand_over)

    async def _note_failure(self, job: Job, row: LedgerRow | None, hand_over: HandOver) -> None:
        """As the dispatcher does, with what was known then."""
        if not isinstance(job.outcome, Failed) or not job.loses_gradient or job.horizon is not None:
            return
        assert job.entry.seq_id is not None
        known = None if row is None else row.horizon
        job.horizon = await self._sources.log.last_position() if known is None else known
        hand_over.lost.add(job.entry.model_id, job.entry.seq_id, job.horizon)

    async def _check(self, job: Job, row: LedgerRow | None, hand_over: HandOver) -> Checked:
        if job.ranks is not None:
            await answered(job)
            await self._note_failure(job, row, hand_over)
        entry, outcome = job.entry, job.outcome
        assert outcome is not None
        stored = await self._sources.results.get(entry.tenant, entry.model_id, entry.seq_id)
        if stored is None:
            return _checked(entry, "unanswered" if row is None else "expired")
        try:
            found = differences(stored.result().outcome, outcome)
        except CodecError as error:
            found = (Difference(field="", published=f"cannot be read: {error}", replayed="a result"),)
        return _checked(entry, "differs" if found else "same", found)

    async def _left_out(self, entry: LogEntry) -> Checked:
        return _checked(entry, "not_run", because="it would write a checkpoint")

    async def _not_reached(self, entry: LogEntry, progress: Progress, sequencer: Sequencer) -> Checked:
        if progress.because is None and await self._sources.settled(entry) is None:
            return _checked(entry, "unanswered")
        missing = sequencer.missing().get(entry.model_id)
        gap = f"seq_id {missing} is not on the log, or no longer"
        return _checked(entry, "not_reached", because=progress.because or gap)


def _checked(
    entry: LogEntry, verdict: Verdict, found: tuple[Difference, ...] = (), because: str | None = None
) -> Checked:
    return Checked(
        model_id=entry.model_id,
        seq_id=entry.seq_id,
        verb=entry.verb,
        verdict=verdict,
        differences=found,
        because=because,
    )
