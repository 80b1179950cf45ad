"""What nats-py needs against peers that mean no good."""

from __future__ import annotations

from typing import Any

from nats.aio.client import Client


def harden(nc: Client) -> None:
    """Whoever may publish could end nats-py's read loop with bytes that it cannot parse: such a message arrives
    without headers, or under a subject that is no one's.
    """
    process_headers, process_msg = nc._process_headers, nc._process_msg

    async def headers_or_none(headers: bytes) -> Any:
        try:
            return await process_headers(headers)
        except (IndexError, ValueError):
            return None

    async def with_readable_subject(sid: int, subject: bytes, *rest: bytes) -> None:
        if not subject.isascii():
            subject = subject.decode(errors="replace").encode()
        await process_msg(sid, subject, *rest)

    nc._process_headers, nc._process_msg = headers_or_none, with_readable_subject
