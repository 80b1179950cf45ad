"""Checkpoints whose time is over go, rows first; until then their rows count as deleted already."""

from __future__ import annotations

import asyncio
import logging
import time

from bus.connection import BrokerError
from bus.tables import CheckpointRow, Table
from runtime import checkpoint_folder

log = logging.getLogger(__name__)

LOOK_EVERY_S = 60.0


async def run(table: Table[CheckpointRow]) -> None:
    """For ever."""
    while True:
        try:
            await sweep(table, time.time())
        except (BrokerError, OSError) as error:
            log.warning("expired checkpoints have to wait: %s", error)
        await asyncio.sleep(LOOK_EVERY_S)


async def sweep(table: Table[CheckpointRow], now: float) -> None:
    """Remove what has expired by `now`. Raises BrokerUnreachable, OSError."""
    for key, seen in (await table.all()).items():
        if seen.expires_at is None or seen.expires_at > now:
            continue
        found = await table.get(key)
        if found is None or found[0] != seen:
            continue  # it was given more time, or replaced
        if await table.delete(key, found[1]):
            await asyncio.to_thread(checkpoint_folder.remove, seen.url)
