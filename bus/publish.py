"""Storing one message and knowing that it is stored.

A lost answer is asked for again, which only idempotent writers may do: ours name the revision they expect, or do not
mind a second copy.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from bus.connection import BrokerError, BrokerUnreachable, Bus

_TRY_S = 2.0
_PAUSE_S = 0.05

_SUBJECT_TAKEN = (10071, 10164)
"""JetStream's codes for "wrong last sequence"."""
_STREAM_FULL = (10077, 10023, 10047)
"""JetStream's codes for a stream at its limit, and for a broker without room."""


class StreamFull(BrokerError):
    """The stream takes no more for now; nothing was stored."""


class SubjectTaken(Exception):
    """The subject is not at the revision that was expected."""

    def __init__(self, asked_before: bool) -> None:
        super().__init__()
        self.asked_before = asked_before
        """An earlier try got no answer: what is there may be our own."""


async def store(
    bus: Bus,
    subject: str,
    body: bytes,
    headers: dict[str, str],
    *,
    doing: str,
    expected_revision: int | None = None,
    timeout_s: float,
) -> int:
    """The message's sequence number, once the broker has it on disk.

    `expected_revision` is the sequence number of the subject's last message, 0 for an empty subject, None for any.
    Raises SubjectTaken, StreamFull, BrokerError with the broker's words, BrokerUnreachable when `timeout_s` is up
    (then it may or may not be stored), MessageTooLarge, NotAllowed.
    """
    bus.check_size(body, doing)
    if expected_revision is not None:
        headers = {**headers, "Nats-Expected-Last-Subject-Sequence": str(expected_revision)}
    deadline = time.monotonic() + timeout_s
    asked_before = False
    while True:
        left = deadline - time.monotonic()
        try:
            answer = await bus.request(subject, body, headers=headers, timeout_s=max(0.05, min(_TRY_S, left)))
            ack: dict[str, Any] = json.loads(answer.data)
            error = ack.get("error")
            if error is None:
                return int(ack["seq"])
            if error.get("err_code") in _SUBJECT_TAKEN:
                raise SubjectTaken(asked_before)
            if error.get("err_code") in _STREAM_FULL:
                raise StreamFull(f"{doing} is refused: {error.get('description')}")
            if error.get("code", 0) < 500:
                raise BrokerError(f"{doing} is refused: {error.get('description')}")
            problem = bus.unreachable(f"{doing}: {error.get('description')}")
        except BrokerUnreachable as unreachable:
            problem = unreachable
        asked_before = True
        if time.monotonic() >= deadline:
            raise bus.unreachable(doing) from problem
        await asyncio.sleep(_PAUSE_S)
