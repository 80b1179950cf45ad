"""The messages of a durable pull consumer, one pull after the other, over one subscription."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncGenerator

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from bus.connection import Bus

_BATCH = 64
_BATCH_BYTES = 32 * 2**20
_EXPIRES_S = 10.0
_HEARTBEAT_S = 1.0
_GIVE_BACK_S = 2.0

_PULL_IS_OVER = ("Batch Completed", "Message Size Exceeds MaxBytes")
"""What the broker says with status 409 when the next pull may follow; anything else ends the consumer."""


async def pulled(bus: Bus, stream: str, consumer: str) -> AsyncGenerator[Msg, None]:
    """Ends when the consumer is gone, and raises BrokerUnreachable when the broker was away or fell silent: the
    caller looks after that and starts anew.

    Closing it gives what was fetched and not yet handed out back to the stream at once. Each pull answers to a
    subject of its own, so that a late status of one is not taken for one of the next.
    """
    request = json.dumps(
        {
            "batch": _BATCH,
            "max_bytes": max(_BATCH_BYTES, 2 * bus.max_payload),
            "expires": int(_EXPIRES_S * 1e9),
            "idle_heartbeat": int(_HEARTBEAT_S * 1e9),
        }
    ).encode()
    inbox = bus.nc.new_inbox()
    sub = await bus.nc.subscribe(f"{inbox}.*", pending_bytes_limit=-1)
    try:
        for number in itertools.count():
            reply = f"{inbox}.{number}"
            await bus.nc.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", request, reply=reply)
            left = _BATCH
            while left > 0:
                msg = await bus.next_message(sub, timeout_s=3 * _HEARTBEAT_S)
                if not _is_status(msg, inbox):
                    left -= 1
                    yield msg
                    continue
                status, said = (msg.headers or {}).get("Status"), (msg.headers or {}).get("Description")
                if status == "100" or msg.subject != reply:
                    continue
                if status in ("404", "408") or said in _PULL_IS_OVER:
                    break
                return
    finally:
        with contextlib.suppress(nats.errors.Error, TimeoutError):
            async with asyncio.timeout(_GIVE_BACK_S):
                await _give_back(sub, inbox)


def _is_status(msg: Msg, inbox: str) -> bool:
    """The broker's own words come on the subject that was asked for; what is stored keeps its own.

    A header `Status` says nothing: whoever published the message may have written it.
    """
    return bool(msg.subject.startswith(f"{inbox}."))


async def _give_back(sub: Subscription, inbox: str) -> None:
    """End the subscription; what the broker had sent for it goes back to the queue."""
    ending = asyncio.create_task(sub.drain())
    try:
        while not ending.done() or sub.pending_msgs:
            with contextlib.suppress(nats.errors.TimeoutError):
                msg = await sub.next_msg(timeout=0.02)
                if not _is_status(msg, inbox):
                    await msg.nak()
        await ending
    finally:
        ending.cancel()
