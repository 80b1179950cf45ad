"""Large uploads keep nothing else waiting."""

from __future__ import annotations

import asyncio

from tests.runtime.ingress.conftest import Wire, client, sdk_body
from tests.runtime.stand_in import Replica, Service

UPLOADS = 8
TOKENS = 300_000
"""16 bytes each: 4.8 MB a body, just under what the SDK puts into one chunk."""
TRIES = 3
"""The machine that runs this may be busy with other things; one quiet burst is enough to show it."""


async def slowest_heartbeat(alice: Wire, url: str, bodies: list[bytes]) -> float:
    """Seconds, of all heartbeats sent while the bodies are uploaded at once."""
    session = await alice.session()

    async def upload(body: bytes) -> int:
        async with client(url, "tml-alice") as http:
            return (await Wire(http).forward_backward(body)).status_code

    uploads = [asyncio.create_task(upload(body)) for body in bodies]
    slowest = 0.0
    while not all(task.done() for task in uploads):
        answer = await alice.post("session_heartbeat", {"session_id": session})
        assert answer.status_code == 200
        slowest = max(slowest, answer.elapsed.total_seconds())
    assert [task.result() for task in uploads] == [200] * len(bodies)
    return slowest


async def test_heartbeats_are_answered_while_large_uploads_come_in(
    alice: Wire, ingress: Replica, service: Service
) -> None:
    model = await alice.model()
    service.dispatcher.go.clear()
    for attempt in range(TRIES):
        numbers = range(1 + attempt * UPLOADS, 1 + (attempt + 1) * UPLOADS)
        bodies = [sdk_body(model, seq, [seq] * TOKENS) for seq in numbers]
        if await slowest_heartbeat(alice, ingress.url, bodies) < 1.0:
            return
    raise AssertionError(f"a heartbeat took a second or more in each of {TRIES} bursts of uploads")
