"""Whether the service can do work: the broker answers, and the group's dispatcher says that it is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from bus.connection import BrokerError
from bus.tables import Tables

ANSWER_WITHIN_S = 2.0


def readiness(tables: Tables, group: str) -> Callable[[], Awaitable[str | None]]:
    """A check that gives None when ready, else what is missing. Reading the group's row probes the broker too."""

    async def missing() -> str | None:
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                found = await tables.groups.get(group)
        except TimeoutError:
            return f"the broker did not answer within {ANSWER_WITHIN_S:g} s"
        except BrokerError as error:
            return str(error)
        if found is None:
            return f"group {group!r} is starting"
        if found[0].status != "ready":
            return f"group {group!r} is {found[0].status}"
        return None

    return missing
