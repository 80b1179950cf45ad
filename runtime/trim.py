"""What `tinkerbus log trim` drops: operations that no recovery, no answer and no reader needs.

A live model keeps what stands behind the older of its two snapshots, and with fewer than two all of it. A model that
has ended keeps everything until its results have expired.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from bus.connection import Bus
from bus.ledger import Ledger
from bus.log import LogEntry, OpsLog
from bus.results import Results
from bus.tables import MODELS, ModelRow, existing_table
from runtime.log_view import NotThere
from runtime.snapshots import KEPT, Snapshot, Snapshots
from runtime.upkeep import drop_from


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """One model: what goes, and why the rest stays."""

    model_id: str
    status: str | None
    """As the table of models has it; None where the log alone knows the model."""
    entries: int = 0
    """Operations that go."""
    bytes: int = 0
    """Of their bodies."""
    ledger_rows: int = 0
    stay: int = 0
    """Operations that stay on the log."""
    because: str
    below_position: int | None = None
    """Where a live model's log is cut; None where all or nothing goes."""
    below_seq: int = 0


def cut(
    model_id: str,
    row: ModelRow | None,
    entries: Sequence[LogEntry],
    kept: Sequence[Snapshot],
    *,
    readable: int,
    ledger_rows: int,
) -> Cut:
    """What may go of a model; `kept` has its newest snapshot first, `readable` is how many results it has. Pure."""
    status = None if row is None else row.status
    stays = len(entries)
    if status == "unloaded" and readable:
        because = f"ended; {readable} of its results can still be read"
    elif status == "unloaded":
        size = sum(len(entry.body) for entry in entries)  # what was stored apart went with the model
        return Cut(
            model_id=model_id,
            status=status,
            entries=len(entries),
            bytes=size,
            ledger_rows=ledger_rows,
            because="ended; its results have expired",
        )
    elif status == "live" and len(kept) >= KEPT:
        lane = kept[KEPT - 1].manifest.lane
        go = [entry for entry in entries if entry.position is not None and entry.position < lane.log_from]
        return Cut(
            model_id=model_id,
            status=status,
            entries=len(go),
            bytes=sum(entry.size for entry in go),
            stay=stays - len(go),
            because=f"a recovery needs what is behind the snapshot before {lane.next_seq}",
            below_position=lane.log_from,
            below_seq=lane.next_seq,
        )
    elif status == "live":
        because = f"a recovery needs all of it: it has {len(kept)} of {KEPT} snapshots"
    else:
        because = "it is neither live nor has it ended"
    return Cut(model_id=model_id, status=status, stay=stays, because=because)


async def cuts(bus: Bus, group: str, snapshots: Snapshots) -> list[Cut]:
    """Of every model that has operations on the log. Raises BrokerUnreachable, NewerFormat."""
    log, results = OpsLog(bus, group), Results(bus)
    models, ledger = await existing_table(bus, MODELS, ModelRow), await Ledger.existing(bus, group)
    rows = {} if models is None else {str(key): row for key, row in (await models.all()).items()}
    of_ledger = [model_id for model_id, _ in await ledger.load()] if ledger is not None else []
    entries: dict[str, list[LogEntry]] = {}
    async for entry in log.so_far():
        entries.setdefault(entry.model_id, []).append(entry)
    made = []
    for model_id, on_log in sorted(entries.items()):
        tenant = on_log[0].tenant
        made.append(
            cut(
                model_id,
                rows.get(model_id),
                on_log,
                await asyncio.to_thread(snapshots.of, model_id),
                readable=len(await results.numbers(tenant, model_id)),
                ledger_rows=of_ledger.count(model_id),
            )
        )
    return made


async def apply(bus: Bus, group: str, one: Cut) -> None:
    """Idempotent, beside a service too: it comes to the same by itself. Raises BrokerUnreachable, NotThere."""
    if not one.entries:
        return
    log = OpsLog(bus, group)
    models, ledger = await existing_table(bus, MODELS, ModelRow), await Ledger.existing(bus, group)
    if models is None or ledger is None:
        raise NotThere("the broker has no table of models, or no ledger: nothing is dropped")
    if one.below_position is None:
        await drop_from(log, ledger, one.model_id)
        return

    def changed(row: ModelRow) -> ModelRow:
        return msgspec.structs.replace(row, trimmed_below=max(one.below_seq, row.trimmed_below))

    # First the row, which sends senders of old numbers to the ledger.
    await models.change(one.model_id, changed)
    await log.trim(one.model_id, one.below_position, one.below_seq)
