"""A stream's messages as they come: those that are there, then new ones, for ever.

Outlives broker restarts and lost wake-ups: what is next is asked for by position, at every announcement, at every
reconnection and once a second. Nothing on the broker remembers the reader.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import nats.errors
from nats.aio.msg import Msg

from bus import scan, subjects
from bus.connection import BrokerUnreachable, Bus
from bus.scan import StoredMessage

_POLL_S = 1.0


async def tail(
    bus: Bus, stream: str, subject_filter: str, from_position: int
) -> AsyncGenerator[StoredMessage, None]:
    """Every message from `from_position` on, in order. Its subjects must be among those announced when stored.

    Raises BrokerUnreachable once the connection is closed, BrokerError when the broker refuses.
    """
    position = from_position
    wake = asyncio.Event()

    async def announced(_: Msg) -> None:
        wake.set()

    bus.on_reconnect.append(wake.set)
    subscription = None
    try:
        while True:
            wake.clear()
            try:
                if subscription is None:
                    subscription = await bus.nc.subscribe(subjects.stored(subject_filter), cb=announced)
                found = await scan.batch(bus, stream, subject_filter, position)
            except (BrokerUnreachable, nats.errors.Error) as error:
                if bus.nc.is_closed:
                    raise bus.unreachable(f"reading stream {stream}", error) from None
                await _wait(wake, 0.25)
                continue
            for message in found:
                position = message.position + 1
                yield message
            if not found:
                await _wait(wake, _POLL_S)
    finally:
        bus.on_reconnect.remove(wake.set)
        if subscription is not None:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()


async def _wait(wake: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await wake.wait()
