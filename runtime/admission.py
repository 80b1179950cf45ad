"""Whether an operation may go onto the log now: not while too much waits there for its result.

What is refused was not stored and may be sent again. The number whose turn it is always gets in: what waits behind
it could not finish without it. So does a number that is on the log already, for it adds nothing.
"""

from __future__ import annotations

from bus.backlog import Backlog, Load
from bus.connection import BrokerError
from bus.ledger import Ledger
from bus.log import Appended, LogEntry, OpsLog
from runtime.config import Limits

FRESH_S = 1.0
"""An older report is read anew. Room that came since is all that it does not know of."""
REFUSING_S = 0.1
"""Likewise, before something is refused."""


class QueueFull(BrokerError):
    """Too much waits for its result; nothing was stored."""


class Admission:
    """The limits of one group, kept by one server."""

    def __init__(self, limits: Limits, backlog: Backlog, ledger: Ledger) -> None:
        self.limits = limits
        self._backlog = backlog
        self._ledger = ledger

    async def waiting(self, model_id: str) -> int:
        """Operations of a model that have no result yet. Raises BrokerUnreachable."""
        await self._backlog.refresh(REFUSING_S)
        return self._backlog.of(model_id).ops

    async def append(self, log: OpsLog, entry: LogEntry, *, trimmed_below: int = 0) -> Appended:
        """`OpsLog.append`, unless too much waits. Raises QueueFull, and what that raises."""
        await self._backlog.refresh(FRESH_S)
        if self._excess(entry) is not None:
            await self._backlog.refresh(REFUSING_S)
            excess = self._excess(entry)
            if excess is not None and not await self._always(log, entry):
                raise QueueFull(excess)
        with self._backlog.appending(entry.model_id, entry.size) as appended_at:
            appended = await log.append(entry, trimmed_below=trimmed_below)
            if not appended.duplicate:
                appended_at(appended.position)
        return appended

    def _excess(self, entry: LogEntry) -> str | None:
        limits = self.limits
        return over(
            self._backlog.of(entry.model_id),
            entry.size,
            f"model_id {entry.model_id!r}",
            ("limits.max_model_ops", limits.max_model_ops),
            ("limits.max_model_bytes", limits.max_model_bytes),
        ) or over(
            self._backlog.total,
            entry.size,
            "this server",
            ("limits.max_group_ops", limits.max_group_ops),
            ("limits.max_group_bytes", limits.max_group_bytes),
        )

    async def _always(self, log: OpsLog, entry: LogEntry) -> bool:
        seq_id = entry.seq_id
        if seq_id is None or seq_id == 0:
            return True
        if await self._ledger.find(entry.model_id, seq_id - 1) is not None:
            return True
        return await log.holds(entry.model_id, seq_id)


def over(load: Load, size: int, who: str, ops: tuple[str, int], size_limit: tuple[str, int]) -> str | None:
    """What is wrong with one operation of `size` bytes more, or None. A limit is a name and a number, 0 for none."""
    name, limit = ops
    if limit and load.ops >= limit:
        return (
            f"{who} has {load.ops} operations without a result; the limit is {limit} ({name}): send this one again "
            "when some have finished"
        )
    name, limit = size_limit
    if limit and load.bytes + size > limit:
        return (
            f"{who} has {load.bytes} bytes of operations without a result, and this one has {size}; the limit is "
            f"{limit} ({name}): send it again when some have finished"
        )
    return None
