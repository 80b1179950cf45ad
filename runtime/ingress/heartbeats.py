"""Heartbeats of sessions, told to whoever ends those that have none; seldom written, however often they come."""

from __future__ import annotations

import time

from bus.tables import HeartbeatRow, Table

WRITE_EVERY_S = 30.0
"""At most so often, for each session; more often where sessions expire soon."""
MOST_KNOWN = 10_000


class Heartbeats:
    """One ingress process's. Only what it has lately written itself is remembered."""

    def __init__(self, table: Table[HeartbeatRow], expire_after_s: float) -> None:
        self._table = table
        self._every_s = min(WRITE_EVERY_S, expire_after_s / 4)
        self._wanted = expire_after_s > 0
        self._written: dict[str, float] = {}

    async def heard(self, session_id: str) -> None:
        """Raises BrokerUnreachable, StreamFull."""
        now = time.monotonic()
        if not self._wanted or now - self._written.get(session_id, float("-inf")) < self._every_s:
            return
        await self._table.put(session_id, HeartbeatRow())
        if len(self._written) >= MOST_KNOWN:
            self._written = {known: at for known, at in self._written.items() if now - at < self._every_s}
        self._written[session_id] = now
