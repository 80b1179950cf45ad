"""What is accepted and has no result yet, per model of one group: the dispatcher's last report, and what came since.

The report is a row in a table, so that it outlives the dispatcher. What was appended behind it, by any server, is
known from the broker's announcements. So the count is too small by no more than what others append at this very
moment, and too large by what finished since the report.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from bus import subjects
from bus.blobs import TB_BLOB, BlobRef
from bus.connection import Bus
from bus.tables import BacklogRow, Table

_POSITION, _SIZE = "Nats-Sequence", "Nats-Msg-Size"


@dataclass(slots=True)
class Load:
    """So many operations, of so many bytes."""

    ops: int = 0
    bytes: int = 0


class Backlog:
    """One server's view. Made by `Backlog.open`."""

    def __init__(self, bus: Bus, table: Table[BacklogRow], group: str) -> None:
        self._bus = bus
        self._table = table
        self._group = group
        self._reported = BacklogRow()
        self._read_at = float("-inf")
        self._since: dict[int, tuple[str, int]] = {}
        """Model and bytes of what was appended behind the report, by position."""
        self._models: dict[str, Load] = {}
        self._total = Load()
        self._subscription: Subscription | None = None

    @classmethod
    async def open(cls, bus: Bus, table: Table[BacklogRow], group: str) -> Backlog:
        """Raises BrokerUnreachable."""
        backlog = cls(bus, table, group)
        pattern = subjects.stored(f"{subjects.PREFIX}.ops.{subjects.escape(group)}.*.*")
        try:
            backlog._subscription = await bus.nc.subscribe(pattern, cb=backlog._announced)
            await bus.nc.flush()  # what others append from here on is announced to us
        except (nats.errors.Error, TimeoutError) as error:
            raise bus.unreachable("listening for operations", error) from None
        return backlog

    async def close(self) -> None:
        if self._subscription is not None:
            with contextlib.suppress(nats.errors.Error):
                await self._subscription.unsubscribe()
            self._subscription = None

    async def refresh(self, max_age_s: float) -> None:
        """Read the dispatcher's report, unless that was done within `max_age_s`. Raises BrokerUnreachable."""
        now = time.monotonic()
        if now - self._read_at < max_age_s:
            return
        self._read_at = now
        found = await self._table.get(self._group)
        if found is not None and found[0].position >= self._reported.position:
            self._report(found[0])

    def of(self, model_id: str) -> Load:
        """Of one model."""
        return self._models.get(model_id) or Load()

    @property
    def total(self) -> Load:
        """Of all models of the group."""
        return self._total

    @contextlib.contextmanager
    def appending(self, model_id: str, size: int) -> Iterator[Callable[[int], None]]:
        """Count an operation that is on its way to the log; tell what is given back the position it got there."""
        self._add(model_id, 1, size)
        try:
            yield lambda position: self._appended(position, model_id, size)
        finally:
            self._add(model_id, -1, -size)

    def _appended(self, position: int, model_id: str, size: int) -> None:
        if position > self._reported.position and position not in self._since:
            self._since[position] = (model_id, size)
            self._add(model_id, 1, size)

    def _report(self, row: BacklogRow) -> None:
        """Put a newer report in the place of the one before, and of what it has counted."""
        for model_id, (ops, size) in self._reported.models.items():
            self._add(model_id, -ops, -size)
        for position in [position for position in self._since if position <= row.position]:
            model_id, size = self._since.pop(position)
            self._add(model_id, -1, -size)
        for model_id, (ops, size) in row.models.items():
            self._add(model_id, ops, size)
        self._reported = row

    def _add(self, model_id: str, ops: int, size: int) -> None:
        load = self._models.setdefault(model_id, Load())
        for counted in (load, self._total):
            counted.ops += ops
            counted.bytes += size
        if load.ops == 0:
            del self._models[model_id]

    async def _announced(self, msg: Msg) -> None:
        headers = msg.headers or {}
        try:
            model_id = subjects.unescape(msg.subject.split(".")[-2])
            blob = headers.get(TB_BLOB)
            size = int(headers[_SIZE]) if blob is None else BlobRef.parse(blob).size
            self._appended(int(headers[_POSITION]), model_id, size)
        except (KeyError, ValueError):
            return  # not an announcement
