"""What the dispatcher's parts work with, opened once over one connection."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from bus.connection import BrokerUnreachable
from bus.lease import LeaseRow
from bus.ledger import Ledger
from bus.log import OpsLog
from bus.publish import StreamFull
from bus.results import Results
from bus.tables import Table, Tables
from observability.recorder import Recorder
from runtime.config import Settings

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_S = 0.5
START_PATIENCE_S = 60.0
"""How long a starting part bears with a broker that has answered before: a machine that loads a model is busy."""


@dataclass(frozen=True, slots=True)
class Services:
    settings: Settings
    log: OpsLog
    results: Results
    tables: Tables
    ledger: Ledger
    recorder: Recorder
    leases: Table[LeaseRow]


async def patiently(attempt: Callable[[], Awaitable[T]], *, for_s: float = math.inf) -> T:
    """Repeat an idempotent attempt while the broker is away or has no room: what the ranks did must get its result.

    Raises the last BrokerUnreachable or StreamFull when that has lasted for `for_s` seconds.
    """
    deadline = time.monotonic() + for_s
    while True:
        try:
            return await attempt()
        except (BrokerUnreachable, StreamFull) as error:
            if time.monotonic() >= deadline:
                raise
            log.warning("waiting for the broker: %s", error)
            await asyncio.sleep(RETRY_S)
