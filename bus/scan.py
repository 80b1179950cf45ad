"""Reading a stream by position, in batches, with direct gets: no consumer, so nothing on the broker can go stale.

A batch is a gapless run of the stream as seen through the subject filter. Where a connection breaks inside a batch
the run is shorter, never holed, because messages come in order over one connection.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import nats.errors
from nats.aio.msg import Msg

from bus.connection import BrokerError, BrokerUnreachable, Bus

BATCH = 64
BATCH_BYTES = 16 * 2**20
_ANSWER_S = 3.0
_STREAM_MISSING = 10059


@dataclass(frozen=True, slots=True)
class StoredMessage:
    subject: str
    position: int
    """The message's sequence number in the stream, from 1."""
    headers: dict[str, str]
    data: bytes


def _stored(msg: Msg, stream: str) -> StoredMessage | None:
    """The message in a direct get's answer, or None where it says that there is none (more)."""
    headers = dict(msg.headers or {})
    if "Nats-Sequence" in headers:
        return StoredMessage(headers["Nats-Subject"], int(headers["Nats-Sequence"]), headers, msg.data or b"")
    status = headers.get("Status")
    if status in ("204", "404"):
        return None
    said = f"the broker refuses to read stream {stream}: {status} {headers.get('Description', '')}".rstrip()
    raise BrokerUnreachable(said) if str(status).startswith("5") else BrokerError(said)


async def batch(bus: Bus, stream: str, subject_filter: str, from_position: int) -> list[StoredMessage]:
    """The messages from `from_position` on, at most BATCH of them; empty at the end of the stream.

    Raises BrokerUnreachable when nothing at all was answered in time, BrokerError when the broker refuses.
    """
    request = {
        "seq": max(1, from_position),
        "next_by_subj": subject_filter,
        "batch": BATCH,
        "max_bytes": BATCH_BYTES,
    }
    inbox = bus.nc.new_inbox()
    found: list[StoredMessage] = []
    try:
        sub = await bus.nc.subscribe(inbox, pending_bytes_limit=-1)
        try:
            await bus.nc.publish(f"$JS.API.DIRECT.GET.{stream}", json.dumps(request).encode(), reply=inbox)
            while True:
                msg = await bus.next_message(sub, timeout_s=_ANSWER_S)
                message = _stored(msg, stream)
                if message is None:
                    return found
                found.append(message)
        finally:
            with contextlib.suppress(nats.errors.Error):
                await sub.unsubscribe()
    except (nats.errors.Error, BrokerUnreachable) as error:
        if found:
            return found
        raise bus.unreachable(f"reading stream {stream}", error) from None


async def last_of(
    bus: Bus, stream: str, subject: str, *, timeout_s: float = _ANSWER_S
) -> StoredMessage | None:
    """The newest message on one subject. Raises BrokerUnreachable when the broker does not answer in time."""
    msg = await bus.request(f"$JS.API.DIRECT.GET.{stream}.{subject}", b"", timeout_s=timeout_s)
    return _stored(msg, stream)


async def last_time(bus: Bus, stream: str, subject_filter: str) -> float | None:
    """When the newest message on these subjects was stored, in seconds since 1970; None where there is none."""
    request = json.dumps({"last_by_subj": subject_filter}).encode()
    msg = await bus.request(f"$JS.API.DIRECT.GET.{stream}", request, timeout_s=_ANSWER_S)
    found = _stored(msg, stream)
    if found is None:
        return None
    # Nanoseconds, which Python's own reader refuses.
    return datetime.fromisoformat(found.headers["Nats-Time-Stamp"][:19] + "+00:00").timestamp()


async def exists(bus: Bus, stream: str) -> bool:
    """Whether the broker has this stream. Raises BrokerUnreachable, BrokerError."""
    return await _info(bus, stream, {}, missing_is_none=True) is not None


async def subjects_of(bus: Bus, stream: str, subject_filter: str) -> list[str]:
    """Every subject that has a message, without reading one. Raises BrokerUnreachable, BrokerError."""
    found: list[str] = []
    while True:
        info = await _info(bus, stream, {"subjects_filter": subject_filter, "offset": len(found)})
        assert info is not None
        page = list(info["state"].get("subjects") or ())
        found += page
        if not page or len(found) >= int(info.get("total", 0)):
            return found


async def last_position(bus: Bus, stream: str) -> int:
    """The stream's last sequence number, 0 while it is empty. Raises BrokerUnreachable, BrokerError."""
    info = await _info(bus, stream, {})
    assert info is not None
    return int(info["state"]["last_seq"])


async def holds(bus: Bus, stream: str, subject: str) -> bool:
    """Whether the stream has a message on the subject. Raises BrokerUnreachable, BrokerError."""
    return bool(await subjects_of(bus, stream, subject))


async def _info(
    bus: Bus, stream: str, request: dict[str, object], *, missing_is_none: bool = False
) -> dict[str, Any] | None:
    body = json.dumps(request).encode()
    msg = await bus.request(f"$JS.API.STREAM.INFO.{stream}", body, timeout_s=_ANSWER_S)
    answer: dict[str, Any] = json.loads(msg.data)
    if error := answer.get("error"):
        if missing_is_none and error.get("err_code") == _STREAM_MISSING:
            return None
        raise _refusal(bus, f"describe stream {stream}", error)
    return answer


async def purge(bus: Bus, stream: str, subject_filter: str, *, below_position: int | None = None) -> None:
    """Drop the messages on these subjects, or those before a position. Raises BrokerUnreachable, BrokerError."""
    request: dict[str, object] = {"filter": subject_filter}
    if below_position is not None:
        request["seq"] = below_position
    answer = await bus.request(
        f"$JS.API.STREAM.PURGE.{stream}", json.dumps(request).encode(), timeout_s=_ANSWER_S
    )
    if error := json.loads(answer.data).get("error"):
        raise _refusal(bus, f"purge stream {stream}", error)


def _refusal(bus: Bus, doing: str, error: dict[str, Any]) -> BrokerError:
    """What the broker itself cannot do now, as on a full disk, may well succeed later."""
    if error.get("code", 0) >= 500:
        return bus.unreachable(f"{doing}: {error.get('description')}")
    return BrokerError(f"the broker refuses to {doing}: {error.get('description')}")
