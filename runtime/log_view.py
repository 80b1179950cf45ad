"""Looking into the log: its models, one operation, one model as it goes on. Reads, and never writes."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
from collections.abc import AsyncGenerator
from typing import Any, TypeAlias

import msgspec

from bus import scan, subjects
from bus.blobs import BlobLost
from bus.codec import CodecError
from bus.connection import Bus
from bus.events import CreateModel, request_id
from bus.ledger import Ledger, LedgerRow
from bus.log import LogEntry, OpsLog
from bus.results import Results, StoredResult
from bus.tables import MODELS, ModelRow, Table, existing_table
from runtime.log_summary import op_in_a_line, outcome_in_a_line, summary, type_of


class NotThere(LookupError):
    """What was asked for is not on the log; one line that names it."""


class ModelLine(msgspec.Struct, kw_only=True):
    """One model of the service."""

    model_id: str
    tenant: str
    status: str | None
    """As the table of models has it; None where the log alone knows the model."""
    base_model: str | None
    first_position: int | None = None
    last_position: int | None = None
    entries: int = 0
    """Operations on the log; 0 for a model that was announced and not yet created, or whose part was trimmed."""
    bytes: int = 0
    """Of the operations' bodies."""
    last_result: int | None = None
    """The largest `seq_id` with a readable result."""
    trimmed_below: int = 0
    """Operations with smaller numbers are held by a snapshot, and may be gone from the log."""


class Operation(msgspec.Struct, kw_only=True):
    """All that is known of one operation."""

    request_id: str
    model_id: str
    seq_id: int | None
    """None for `unload_model`."""
    tenant: str | None
    position: int | None = None
    """None where the entry is no longer on the log, like the five that follow."""
    verb: str | None = None
    content_type: str | None = None
    hash: str | None = None
    bytes: int | None = None
    op: dict[str, Any] | None = None
    """The operation, with shapes for tensors; `{"error": …}` where it cannot be read."""
    ledger: LedgerRow | None = None
    """None while the operation has not been settled."""
    result: dict[str, Any] | None = None
    """The outcome, with shapes for tensors; None while there is none, or no longer."""


class EntryLine(msgspec.Struct, kw_only=True, tag_field="kind", tag="entry"):
    """An operation that stands on the log."""

    position: int
    request_id: str
    seq_id: int | None
    verb: str
    bytes: int
    says: str
    """The operation in some words."""


class ResultLine(msgspec.Struct, kw_only=True, tag_field="kind", tag="result"):
    """What came of an operation."""

    request_id: str
    seq_id: int | None
    type: str
    bytes: int
    says: str
    """The outcome in some words."""


Line: TypeAlias = EntryLine | ResultLine


class LogView:
    """The log of one group, and what belongs to it. `await LogView.open(bus, group)`, with a server's connection."""

    def __init__(self, bus: Bus, group: str, models: Table[ModelRow] | None, ledger: Ledger | None) -> None:
        self._log = OpsLog(bus, group)
        self._results = Results(bus)
        self._models = models
        self._ledger = ledger

    @classmethod
    async def open(cls, bus: Bus, group: str) -> LogView:
        """Raises NotThere for a broker that no service has used, BrokerUnreachable."""
        for stream in (subjects.OPS_STREAM, subjects.RESULTS_STREAM):
            if not await scan.exists(bus, stream):
                raise NotThere(f"the broker has no stream {stream}: no tinkerbus has run on it")
        return cls(bus, group, await existing_table(bus, MODELS, ModelRow), await Ledger.existing(bus, group))

    async def models(self) -> list[ModelLine]:
        """Every model, in the order of their first operations; those without any come last.

        Reads the whole log. Raises NotThere where there are none.
        """
        lines: dict[str, ModelLine] = {}
        async for entry in self._log.so_far():
            line = lines.get(entry.model_id)
            if line is None:
                line = lines[entry.model_id] = ModelLine(
                    model_id=entry.model_id,
                    tenant=entry.tenant,
                    status=None,
                    base_model=None,
                    first_position=entry.position,
                )
            line.last_position = entry.position
            line.entries += 1
            line.bytes += entry.size
            line.base_model = line.base_model or _base_model(entry)
        rows = {} if self._models is None else await self._models.all()
        for model_id, row in sorted(rows.items(), key=lambda item: item[1].created_at):
            name = str(model_id)
            line = lines.setdefault(
                name, ModelLine(model_id=name, tenant=row.tenant, status=None, base_model=None)
            )
            line.tenant, line.status = row.tenant, row.status
            line.base_model = row.base_model or line.base_model
            line.trimmed_below = row.trimmed_below
        if not lines:
            raise NotThere("the log is empty: no model has been created")
        for line in lines.values():
            numbers = await self._results.numbers(line.tenant, line.model_id)
            line.last_result = max((n for n in numbers if n is not None), default=None)
        return list(lines.values())

    async def operation(self, model_id: str, seq_id: int | None) -> Operation:
        """One operation; `seq_id` None is the model's `unload_model`. Raises NotThere, BrokerUnreachable."""
        entry = await self._log.get(model_id, seq_id)
        ledger = None if self._ledger is None else await self._ledger.find(model_id, seq_id)
        tenant = entry.tenant if entry is not None else await self._tenant_of(model_id)
        result = await self._results.get(tenant, model_id, seq_id)
        if entry is None and ledger is None and result is None:
            raise await self._no_number(model_id, seq_id)
        found = Operation(
            request_id=request_id(model_id, seq_id),
            model_id=model_id,
            seq_id=seq_id,
            tenant=tenant,
            ledger=ledger,
            result=None if result is None else _outcome(result),
        )
        if entry is not None:
            found.position, found.verb, found.content_type = entry.position, entry.verb, entry.content_type
            found.hash, found.bytes, found.op = entry.body_hash, entry.size, await self._op(entry)
        return found

    async def follow(self, model_id: str, from_position: int | None = None) -> AsyncGenerator[Line, None]:
        """A model's operations and results as they come, for ever; a result never comes before its operation.

        From `from_position` of the log on, with the results of those operations that are readable; None is from now
        on. Raises NotThere, BrokerUnreachable, NewerFormat.
        """
        tenant = await self._tenant_of(model_id)
        shown: set[int | None] = set()
        results_from = 1
        if from_position is None:
            from_position = await self._log.last_position() + 1
            results_from = await self._results.last_position() + 1
            shown = await self._log.numbers(model_id)
        early: dict[int | None, ResultLine] = {}
        items = _merged(
            _entry_lines(self._log, model_id, from_position),
            _result_lines(self._results, tenant, model_id, results_from),
        )
        async with contextlib.aclosing(items):
            async for item in items:
                if isinstance(item, EntryLine):
                    shown.add(item.seq_id)
                    yield item
                    if (waiting := early.pop(item.seq_id, None)) is not None:
                        yield waiting
                elif item.seq_id in shown:
                    yield item
                else:
                    early[item.seq_id] = item

    async def _op(self, entry: LogEntry) -> dict[str, Any]:
        try:
            op: dict[str, Any] = summary((await self._log.whole(entry)).op())
        except (BlobLost, CodecError) as error:
            return {"error": f"cannot be read: {error}"}
        return op

    async def _tenant_of(self, model_id: str) -> str:
        """Raises NotThere for a model that neither the table nor the log knows."""
        if self._models is not None and (found := await self._models.get(model_id)) is not None:
            return found[0].tenant
        for number in await self._log.numbers(model_id):
            if (entry := await self._log.get(model_id, number)) is not None:
                return entry.tenant
        raise await self._no_model(model_id)

    async def _no_model(self, model_id: str) -> NotThere:
        known = await self._log.models()
        if self._models is not None:
            known |= {str(key) for key in await self._models.keys()}
        if not known:
            return NotThere(f"there is no model {model_id!r}: the log is empty")
        close = difflib.get_close_matches(model_id, sorted(known), n=1)
        hint = f"did you mean {close[0]!r}?" if close else "`tinkerbus log models` lists them"
        return NotThere(f"there is no model {model_id!r}: {hint}")

    async def _no_number(self, model_id: str, seq_id: int | None) -> NotThere:
        numbers = await self._log.numbers(model_id)
        there = sorted(n for n in numbers if n is not None)
        has = f"its numbers go from {there[0]} to {there[-1]}" if there else "it has no operations on the log"
        what = "has not been unloaded" if seq_id is None else f"has no operation {seq_id}"
        return NotThere(f"model {model_id!r} {what}: {has}")


async def _entry_lines(log: OpsLog, model_id: str, position: int) -> AsyncGenerator[EntryLine, None]:
    async with contextlib.aclosing(log.read(position, model_id=model_id)) as entries:
        async for entry in entries:
            assert entry.position is not None
            yield EntryLine(
                position=entry.position,
                request_id=entry.request_id,
                seq_id=entry.seq_id,
                verb=entry.verb,
                bytes=entry.size,
                says=await _op_says(log, entry),
            )


async def _result_lines(
    results: Results, tenant: str, model_id: str, position: int
) -> AsyncGenerator[ResultLine, None]:
    async with contextlib.aclosing(results.read(tenant, model_id, position)) as stored:
        async for seq_id, result in stored:
            try:
                outcome = result.result().outcome
                kind, says = type_of(outcome), outcome_in_a_line(outcome)
            except CodecError as error:
                kind, says = "unreadable", str(error)
            yield ResultLine(
                request_id=request_id(model_id, seq_id),
                seq_id=seq_id,
                type=kind,
                bytes=len(result.body),
                says=says,
            )


async def _merged(*sources: AsyncGenerator[Line, None]) -> AsyncGenerator[Line, None]:
    """What the sources give, as it comes, the first source's first; the first of their errors ends it."""
    next_of: dict[int, asyncio.Task[Line]] = {}
    try:
        while True:
            for i, source in enumerate(sources):
                if i not in next_of:
                    next_of[i] = asyncio.ensure_future(anext(source))
            done, _ = await asyncio.wait(next_of.values(), return_when=asyncio.FIRST_COMPLETED)
            for i in [i for i, task in sorted(next_of.items()) if task in done]:
                yield next_of.pop(i).result()
    finally:
        for task in next_of.values():
            task.cancel()
        await asyncio.gather(*next_of.values(), return_exceptions=True)
        for source in sources:
            await source.aclose()


def _base_model(entry: LogEntry) -> str | None:
    if entry.verb != "create_model":
        return None
    with contextlib.suppress(CodecError):
        op = entry.op()
        if isinstance(op, CreateModel):
            return op.base_model
    return None


async def _op_says(log: OpsLog, entry: LogEntry) -> str:
    try:
        return op_in_a_line((await log.whole(entry)).op())
    except (BlobLost, CodecError) as error:
        return f"cannot be read: {error}"


def _outcome(stored: StoredResult) -> dict[str, Any]:
    try:
        outcome: dict[str, Any] = summary(stored.result().outcome)
    except CodecError as error:
        return {"error": f"cannot be read: {error}"}
    return outcome
