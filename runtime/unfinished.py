"""Operations that were read from the log and have no result yet, and the report of them that servers admit by."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bus.log import LogEntry
from bus.tables import BacklogRow, Table
from runtime.services import patiently

REPORT_S = 0.25


class Unfinished:
    """Counts of one group, per model. Adding and removing is idempotent."""

    def __init__(self) -> None:
        self._models: dict[str, dict[int | None, int]] = {}
        self.position = 0
        """Of the last entry that was looked at."""

    def read(self, entry: LogEntry, *, waits: bool = True) -> None:
        """Take note of the next entry of the log; `waits` is whether it has no result yet."""
        assert entry.position is not None, "entries come from the log"
        self.position = entry.position
        if waits:
            self._models.setdefault(entry.model_id, {})[entry.seq_id] = entry.size

    def finish(self, entry: LogEntry) -> None:
        """It has its result. A model that has ended has no operations any more."""
        sizes = self._models.get(entry.model_id, {})
        sizes.pop(entry.seq_id, None)
        if not sizes or entry.seq_id is None:
            self._models.pop(entry.model_id, None)

    def row(self) -> BacklogRow:
        models = {model_id: (len(sizes), sum(sizes.values())) for model_id, sizes in self._models.items()}
        return BacklogRow(position=self.position, models=models)


async def report(
    table: Table[BacklogRow], group: str, unfinished: Unfinished, counted: Callable[[], bool] = lambda: True
) -> None:
    """Write the counts down whenever they have changed, for ever, as long as `counted` says that they are whole."""
    said: BacklogRow | None = None
    while True:
        row = unfinished.row()
        if row != said and counted():
            await patiently(lambda row=row: table.put(group, row))  # type: ignore[misc]
            said = row
        await asyncio.sleep(REPORT_S)
