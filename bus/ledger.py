"""What became of every operation: body hash, outcome, place in the log, for as long as its model lives.

The ledger stands apart from the log, so that trimming the log never touches it. Recording is idempotent: a replay
writes the same row again.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from bus import subjects
from bus.connection import Bus
from bus.tables import Table, existing_table, open_table

_NAME = "tinker_ledger"


class LedgerRow(msgspec.Struct, frozen=True, kw_only=True):
    body_hash: str
    outcome: Literal["done", "failed"]
    position: int
    """Where the operation stands, or stood, in the log."""
    horizon: int | None = None
    """Of a failure: the log's last position when it was published; see `runtime.lost_calls`."""
    loaded: str | None = None
    """Of a load: the folder of what was loaded, an fsspec URL. A replay loads that, whatever has its name by then."""
    given_up: int = 0
    """How often it took the ranks down before it was given up; it never runs again. 0 for all others."""


class Ledger:
    """The ledger of one group. `await Ledger.open(bus, group)`."""

    def __init__(self, table: Table[LedgerRow], group: str) -> None:
        self._table = table
        self.group = group

    @classmethod
    async def open(cls, bus: Bus, group: str, *, replicas: int = 1) -> Ledger:
        return cls(await open_table(bus, _NAME, LedgerRow, replicas=replicas), group)

    @classmethod
    async def existing(cls, bus: Bus, group: str) -> Ledger | None:
        """The ledger, or None while nobody has made it: for who only looks."""
        table = await existing_table(bus, _NAME, LedgerRow)
        return None if table is None else cls(table, group)

    async def record(
        self,
        model_id: str,
        seq_id: int | None,
        body_hash: str,
        outcome: Literal["done", "failed"],
        position: int,
        horizon: int | None = None,
        given_up: int = 0,
        loaded: str | None = None,
    ) -> None:
        row = LedgerRow(
            body_hash=body_hash,
            outcome=outcome,
            position=position,
            horizon=horizon,
            given_up=given_up,
            loaded=loaded,
        )
        await self._table.put(self._key(model_id, seq_id), row)

    async def find(self, model_id: str, seq_id: int | None) -> LedgerRow | None:
        found = await self._table.get(self._key(model_id, seq_id))
        return None if found is None else found[0]

    async def last_time(self, model_id: str) -> float | None:
        """When an operation of the model last got its result, in whole seconds since 1970; None for none."""
        return await self._table.last_time((self.group, model_id))

    async def load(self) -> dict[tuple[str, int | None], LedgerRow]:
        """Every row of the group by (model_id, seq_id), in the order in which they were last written."""
        rows = {}
        for key, row in (await self._table.all(self.group)).items():
            _, model_id, number = tuple(key)
            rows[model_id, subjects.parse_seq_token(number)] = row
        return rows

    async def forget(self, model_id: str) -> None:
        """Drop all rows of a model that has ended."""
        await self._table.purge((self.group, model_id))

    def _key(self, model_id: str, seq_id: int | None) -> tuple[str, str, str]:
        return (self.group, model_id, subjects.seq_token(seq_id))
