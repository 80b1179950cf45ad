"""Publishing bytes that no well-behaved client would."""

from __future__ import annotations

import asyncio
import json

from bus.connection import Credentials


async def publish(url: str, credentials: Credentials, subject: bytes, headers: bytes, body: bytes) -> None:
    """One message, its header block as it is. Returns when the broker has read it."""
    host, _, port = url.removeprefix("nats://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    await reader.readline()
    hello = {"user": credentials.user, "pass": credentials.password, "headers": True, "verbose": False}
    writer.write(b"CONNECT " + json.dumps(hello).encode() + b"\r\n")
    writer.write(b"HPUB %b %d %d\r\n" % (subject, len(headers), len(headers) + len(body)))
    writer.write(headers + body + b"\r\nPING\r\n")
    assert await reader.readline() == b"PONG\r\n"
    writer.close()
