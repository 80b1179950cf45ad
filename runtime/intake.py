"""From the submit queue onto the log: what event clients publish, checked and appended.

A submission leaves the queue once it stands on the log, or once it is certain that it never can. While its model
has too much waiting it stays there, until the broker takes no more for that model. Everything here may happen twice,
on one intake or on several, and changes nothing the second time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from msgspec.structs import replace

from bus import subjects
from bus.codec import JSON, MSGPACK, PROTOBUF, datum_sizes, encode
from bus.connection import BrokerUnreachable, Bus
from bus.errors import CodecError
from bus.events import CreateModel, Failed, ForwardBackward, Result, Submission
from bus.log import BodyConflict, LogEntry, OpsLog
from bus.publish import StreamFull
from bus.results import Results
from bus.submit import SubmitReader, Submitted
from bus.tables import ModelRow, Tables
from observability.recorder import Recorder
from runtime import entries
from runtime.admission import Admission, QueueFull

logger = logging.getLogger("tinkerbus.intake")

PAUSE_S = 0.5
"""Between tries while the broker is away or has no room."""
SHORTEST_HOLD_S, LONGEST_HOLD_S = 0.25, 4.0
"""How long what a model has no room for stays in the submit queue, the first time and at most. Other models' go on."""


class Intake:
    """One reader of the submit queue. Any number may run, in any number of processes."""

    def __init__(
        self,
        bus: Bus,
        log: OpsLog,
        tables: Tables,
        results: Results,
        admission: Admission,
        recorder: Recorder | None = None,
    ) -> None:
        self._bus = bus
        self._log = log
        self._tables = tables
        self._results = results
        self._admission = admission
        self._recorder = recorder
        self._reader = SubmitReader(bus)
        self.dropped = 0
        """Submissions that named no number, or a model that no subject can name, so that nobody could be told."""

    async def run(self) -> None:
        """Take submissions, for ever, in the queue's order. Cancel it: what is unfinished comes again at once.

        Raises BrokerError when the broker refuses the queue.
        """
        async with contextlib.aclosing(self._reader.read()) as queue:
            async for submitted in queue:
                await self._take(submitted)

    async def _take(self, submitted: Submitted) -> None:
        """Keep at it until it is settled: the next one may depend on this one."""
        while True:
            try:
                await self._settle(submitted)
            except QueueFull as error:
                logger.debug("submission of model %r stays in the queue: %s", submitted.model_id, error)
                await submitted.nak(hold_s(submitted.deliveries))
                return
            except (StreamFull, BrokerUnreachable) as error:
                logger.warning("submission of model %r has to wait: %s", submitted.model_id, error)
                await asyncio.sleep(PAUSE_S)
            except asyncio.CancelledError:
                await submitted.nak(0)
                raise
            else:
                self._count("tinkerbus_bus_consumed_messages_total", "submit")
                return

    async def _settle(self, submitted: Submitted) -> None:
        entry = entry_of(submitted, self._admission.limits.max_datum_bytes)
        if entry is None or not subjects.fits(entry.model_id):
            self.dropped += 1
            logger.warning(
                "dropped a submission of tenant %r for model %r: %s",
                submitted.tenant,
                submitted.model_id[:100],
                submitted.submission if entry is None else "its id is too long",
            )
            await submitted.term()
            return
        row = await self._row(submitted, entry)
        if row is None:
            await submitted.nak()
            return
        if row.tenant != entry.tenant:
            await self._fail(entry, f"model_id {entry.model_id!r} is taken: choose another")
        elif row.copy:
            await self._fail(entry, f"model_id {entry.model_id!r} is the run of a copied checkpoint")
        elif row == _uncreated(row) and entry.seq_id != 0:
            await self._fail_uncreated(row, entry)
        else:
            await self._append(row, entry)
        await submitted.ack()

    async def _append(self, row: ModelRow, entry: LogEntry) -> None:
        try:
            appended = await self._admission.append(self._log, entry, trimmed_below=row.trimmed_below)
        except BodyConflict as error:
            logger.warning("refused a submission of tenant %r: %s", entry.tenant, error)
        else:
            if not appended.duplicate:
                self._count("tinkerbus_bus_published_messages_total", "ops")

    async def _row(self, submitted: Submitted, entry: LogEntry) -> ModelRow | None:
        """The model's row; number 0 makes it. None while its creation is still in the queue."""
        found = await self._tables.models.get(entry.model_id)
        if found is not None:
            return found[0]
        if entry.seq_id != 0:
            # Another intake may have died with the creation in hand: then it comes again.
            oldest = await self._reader.oldest(submitted.tenant, submitted.model_id)
            if oldest is not None and oldest != submitted.body:
                return None
            new = _uncreated(ModelRow(tenant=entry.tenant, base_model="", created_at=time.time()))
        else:
            new = _row_of(submitted)
        while not await self._tables.models.create(entry.model_id, new):
            found = await self._tables.models.get(entry.model_id)
            if found is not None:
                return found[0]
        return new

    async def _fail_uncreated(self, row: ModelRow, entry: LogEntry) -> None:
        """Fail an operation of a model that nobody created. Its id is used up, so that this answer stays true."""
        error = f"model_id {entry.model_id!r} is not known: seq_id 0 has to create it before any other"
        refusal = entries.of_refusal(
            entry.tenant, entry.model_id, 0, error, "model_id", b"", entry.content_type
        )
        await self._append(row, refusal)
        await self._fail(entry, error)

    async def _fail(self, entry: LogEntry, error: str) -> None:
        """Answer in the sender's own results; the log and another owner of the model see nothing of it."""
        await self._results.publish(
            entry.tenant,
            Result(
                request_id=entry.request_id,
                model_id=entry.model_id,
                seq_id=entry.seq_id,
                outcome=Failed(error=error, category="user", field="model_id"),
            ),
            JSON if entry.content_type == JSON else MSGPACK,
        )

    def _count(self, name: str, stream: str) -> None:
        if self._recorder is not None:
            self._recorder.inc(name, stream=stream)


def hold_s(deliveries: int) -> float:
    """How long a submission of a model that has too much waiting stays away; it has come `deliveries` times."""
    return min(LONGEST_HOLD_S, SHORTEST_HOLD_S * 2.0 ** min(deliveries - 1, 10))


def _row_of(submitted: Submitted) -> ModelRow:
    """What the creation asks for; of one that cannot be understood, only whose it is."""
    row = ModelRow(tenant=submitted.tenant, base_model="", created_at=time.time())
    if isinstance(submitted.submission, CodecError) or not isinstance(submitted.submission.op, CreateModel):
        return row
    op = submitted.submission.op
    # Of a model that starts from a checkpoint, the base model shows once it is live.
    base_model = op.base_model or (op.start.path if op.start is not None else "")
    return replace(row, base_model=base_model, lora=op.lora, user_metadata=op.user_metadata)


def _uncreated(row: ModelRow) -> ModelRow:
    """The row of a model whose first operation was not its creation."""
    return replace(row, base_model="", lora=None, status="failed")


def _within(submitted: Submitted, max_datum_bytes: int) -> Submission | CodecError:
    """The submission, or what is wrong with the size of its datums."""
    submission, body = submitted.submission, submitted.body
    if isinstance(submission, CodecError) or not isinstance(submission.op, ForwardBackward):
        return submission
    if not max_datum_bytes or len(body) <= max_datum_bytes:
        return submission
    protobuf = submitted.content_type == PROTOBUF
    sizes = datum_sizes(body) if protobuf else [len(encode(datum)) for datum in submission.op.data]
    wrong = entries.too_large(sizes, max_datum_bytes)
    if wrong is None:
        return submission
    wrong.seq_id = submission.seq_id
    return wrong


def entry_of(submitted: Submitted, max_datum_bytes: int = 0) -> LogEntry | None:
    """What goes onto the log for a submission; None where its number cannot be read. 0 is no limit."""
    tenant, model_id = submitted.tenant, submitted.model_id
    submission = _within(submitted, max_datum_bytes)
    if isinstance(submission, CodecError):
        if submission.seq_id is None:
            return None
        return entries.of_refusal(
            tenant,
            model_id,
            submission.seq_id,
            str(submission),
            submission.field,
            submitted.body,
            submitted.content_type,
        )
    if submitted.content_type == PROTOBUF and submission.seq_id is not None:
        return entries.of_sdk_body(tenant, model_id, submission.seq_id, submitted.body)
    return entries.of_op(tenant, model_id, submission.seq_id, submission.op, submitted.content_type)
