"""Servers and sampler processes, over plain messages of the broker: nothing of it is stored.

A sampling request goes to any sampler process of the group, which says at once whether it takes it. What it has taken
stands in `tables.samples` until its result is stored; a process that answers no more has lost what it took.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec
from nats.errors import NoRespondersError

from bus import subjects
from bus.connection import BrokerUnreachable, Bus
from runtime.sampler.contract import SampleRequest

TAKEN_WITHIN_S = 15.0
ALIVE_WITHIN_S = 2.0
LOOKS = 4
LOOK_EVERY_S = 0.5
"""A process counts as gone after so many looks: one that has lost its connection is back by then."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Of a sampler process to a request."""

    status: Literal["taken", "full", "refused"]
    detail: str = ""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """To one sampler process. An empty one asks whether it is there."""

    cancel: str | None = None
    """The request id that nobody waits for any more."""


class NoSampler(Exception):
    """No sampler process listens."""


async def ask(bus: Bus, group: str, request: SampleRequest) -> Answer:
    """Raises NoSampler, BrokerUnreachable, MessageTooLarge."""
    body = msgspec.msgpack.encode(request)
    bus.check_size(body, f"the sampling request {request.request_id}")
    try:
        answer = await bus.request(subjects.sample(group), body, timeout_s=TAKEN_WITHIN_S)
    except BrokerUnreachable as error:
        if isinstance(error.__cause__, NoRespondersError):
            raise NoSampler("no sampler process is there yet") from None
        raise
    return msgspec.msgpack.decode(answer.data, type=Answer)


async def tell(bus: Bus, group: str, process: str, order: Order) -> bool:
    """Whether that process has heard it. One that is merely slow counts as having heard."""
    try:
        await bus.request(
            subjects.sampler_process(group, process), msgspec.msgpack.encode(order), timeout_s=ALIVE_WITHIN_S
        )
    except BrokerUnreachable as error:
        return not isinstance(error.__cause__, NoRespondersError)
    return True


async def alive(bus: Bus, group: str, process: str) -> bool:
    """Whether a sampler process is there."""
    for look in range(LOOKS):
        if look:
            await asyncio.sleep(LOOK_EVERY_S)
        if await tell(bus, group, process, Order()):
            return True
    return False
