"""What nobody asks for any more goes: checkpoints past their time, and folders without a row."""

from __future__ import annotations

import asyncio
import logging
import time

from bus.lease import Lease
from runtime.checkpoints.saving import expired
from runtime.checkpoints.store import Store
from runtime.services import Services, patiently

log = logging.getLogger(__name__)

EVERY_S = 30.0
UNLISTED_EVERY = 20
"""Looks at the table to one at the folders, which may be far away."""


class Keeping:
    """Of one life of a group, which alone removes checkpoints' folders."""

    def __init__(self, services: Services, lease: Lease, store: Store) -> None:
        self._s = services
        self._lease = lease
        self._store = store

    async def run(self) -> None:
        """Until it is cancelled. Begins once a replay is over, which may need what is listed no more."""
        look = 0
        while True:
            await self._lease.confirm()
            await self.expire()
            if look % UNLISTED_EVERY == 0:
                await self.sweep()
            look += 1
            await asyncio.sleep(EVERY_S)

    async def expire(self) -> None:
        """Delete what is past its time: first the row, then the folder."""
        table = self._s.tables.checkpoints
        for key in await patiently(table.keys):
            found = await patiently(lambda k=key: table.get(k))  # type: ignore[misc]
            if found is None or not expired(found[0], time.time()):
                continue
            row, revision = found
            if await patiently(lambda k=key, r=revision: table.delete(k, r)):  # type: ignore[misc]
                log.info("checkpoint %s has expired", "/".join(key))
                await self._remove(row.url)

    async def sweep(self) -> None:
        """Remove every folder that no row names."""
        try:
            places = await asyncio.to_thread(self._store.places)
        except Exception as error:  # OSError, or whatever the file system of the URL raises
            log.warning("the checkpoints' folders cannot be listed: %s", error)
            return
        # The rows after the folders: a folder that was whole in between has its row by now.
        checkpoints = await patiently(self._s.tables.checkpoints.all)
        samplers = await patiently(self._s.tables.samplers.all)
        listed = {row.url for row in checkpoints.values()} | {row.url for row in samplers.values()}
        for url in sorted(places - listed):
            log.info("removing %s, which no row names", url)
            await self._remove(url)

    async def _remove(self, url: str) -> None:
        try:
            await asyncio.to_thread(self._store.remove, url)
        except Exception as error:  # the next sweep finds it
            log.warning("the folder %s could not be removed yet: %s", url, error)
