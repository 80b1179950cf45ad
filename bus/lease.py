"""The right to act for a group: one dispatcher has it at a time, and each new holder a higher epoch.

The lease is a row that its holder rewrites every few seconds. Whoever wants it watches the row with a clock of its
own and takes it when it has not changed for the lease's time, so that no two clocks are compared. A holder that was
stopped and woken notices by its own clock, and acts again only if the row is still as it left it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

import msgspec

from bus.connection import BrokerUnreachable, Bus
from bus.publish import StreamFull
from bus.tables import Table, open_table

log = logging.getLogger(__name__)

_RENEWALS = 4
"""Within the lease's time."""


class LeaseLost(RuntimeError):
    """Somebody else acts for the group now; whoever gets this must not."""


class LeaseRow(msgspec.Struct, frozen=True, kw_only=True):
    holder: str
    """Empty where the last holder gave it back."""
    epoch: int
    beat: int = 0
    """Goes up with each renewal."""


async def open_leases(bus: Bus) -> Table[LeaseRow]:
    """The table of all groups' leases, by group."""
    return await open_table(bus, "tinker_leases", LeaseRow)


async def free(table: Table[LeaseRow], group: str) -> None:
    """Give back a lease whose holder is known to be dead."""
    await table.change(group, lambda row: LeaseRow(holder="", epoch=row.epoch))


class Lease:
    """One that is held. Made by `acquire`."""

    def __init__(
        self,
        table: Table[LeaseRow],
        group: str,
        row: LeaseRow,
        revision: int,
        time_s: float,
        predecessor: str = "",
    ) -> None:
        self.predecessor = predecessor
        """Who held it before and did not give it back; it may be alive, and stopped."""
        self._table = table
        self._group = group
        self._row = row
        self._revision = revision
        self._time_s = time_s
        self._renewed = time.monotonic()
        self._renewing = asyncio.Lock()

    @classmethod
    async def acquire(cls, table: Table[LeaseRow], group: str, holder: str, time_s: float) -> Lease:
        """Returns once nobody else has had it for `time_s`. May be cancelled."""
        seen: tuple[int, float] | None = None
        while True:
            # Before asking: what is written at most now counts from now.
            now = time.monotonic()
            try:
                found = await table.get(group)
                if found is None:
                    await table.create(group, LeaseRow(holder="", epoch=0))
                    continue
                if time.monotonic() - now > time_s / _RENEWALS:
                    seen = None  # the broker was away, for its holder too: begin anew
                    continue
                row, revision = found
                if seen is None or seen[0] != revision:
                    seen = (revision, now)
                if not row.holder or now - seen[1] >= time_s:
                    mine = LeaseRow(holder=holder, epoch=row.epoch + 1)
                    if (taken := await table.update(group, mine, revision)) is not None:
                        lease = cls(table, group, mine, taken, time_s, row.holder)
                        lease._renewed = now
                        return lease
                    continue
            except (BrokerUnreachable, StreamFull) as error:
                log.warning("waiting for the broker: %s", error)
                seen = None
            await asyncio.sleep(time_s / _RENEWALS / 2)

    @property
    def epoch(self) -> int:
        """Of this holder: higher than that of every one before."""
        return self._row.epoch

    async def confirm(self) -> None:
        """Returns at once while the lease is known to be ours, else once it is again. Raises LeaseLost."""
        while time.monotonic() - self._renewed >= self._time_s:
            try:
                await self._renew()
            except (BrokerUnreachable, StreamFull) as error:
                log.warning("waiting for the broker: %s", error)
                await asyncio.sleep(self._time_s / _RENEWALS / 2)

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Renew it as long as the context lasts, which ends with LeaseLost when that fails."""
        try:
            async with asyncio.TaskGroup() as tasks:
                keeping = tasks.create_task(self.keep())
                yield
                keeping.cancel()
        except ExceptionGroup as failures:
            if lost := failures.subgroup(LeaseLost):
                raise LeaseLost(f"another holder acts for group {self._group}") from lost
            if len(failures.exceptions) == 1:
                raise failures.exceptions[0] from None
            raise

    async def keep(self) -> None:
        """Renew it, for ever. Raises LeaseLost."""
        while True:
            await asyncio.sleep(self._time_s / _RENEWALS)
            try:
                await self._renew()
            except (BrokerUnreachable, StreamFull) as error:
                log.warning("the lease could not be renewed: %s", error)

    async def release(self) -> None:
        """Give it back, so that the next one need not wait. Raises BrokerUnreachable."""
        async with self._renewing:
            await self._table.update(self._group, LeaseRow(holder="", epoch=self._row.epoch), self._revision)

    async def _renew(self) -> None:
        async with self._renewing:
            now = time.monotonic()
            row = msgspec.structs.replace(self._row, beat=self._row.beat + 1)
            revision = await self._table.update(self._group, row, self._revision)
            if revision is None:
                raise LeaseLost(f"the lease of group {self._group} is no longer that of epoch {self.epoch}")
            self._row, self._revision, self._renewed = row, revision, now
