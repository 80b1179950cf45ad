"""Serve's proxy, which does not know our routes while they are being deployed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ray.serve._private.http_util import convert_object_to_asgi_messages
from starlette.types import Message, Receive, Scope, Send

from runtime.ingress.answers import refusal
from runtime.serve_proxy import middlewares


async def answer_of(messages: list[dict[str, Any]]) -> tuple[int, dict[bytes, bytes], bytes]:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    (middleware,) = middlewares()
    await middleware.cls(app)({"type": "http", "method": "POST", "path": "/"}, receive, send)
    start, *parts = sent
    return start["status"], dict(start["headers"]), b"".join(part.get("body", b"") for part in parts)


async def test_a_path_that_the_proxy_does_not_know_is_to_be_asked_again() -> None:
    status, headers, body = await answer_of(
        convert_object_to_asgi_messages("Path '/api/v1/retrieve_future' not found.", status_code=404)
    )
    assert status == 429
    assert float(headers[b"retry-after"]) > 0
    assert json.loads(body) == {"detail": "the service is starting"}


@pytest.mark.parametrize("status", [404, 400])
async def test_what_the_ingress_refuses_stays_as_it_is(status: int) -> None:
    refused = refusal(status, "model_id 'm' is not known")
    messages = [
        {"type": "http.response.start", "status": status, "headers": refused.raw_headers},
        {"type": "http.response.body", "body": refused.body},
    ]
    found, _, body = await answer_of(messages)
    assert (found, json.loads(body)) == (status, {"detail": "model_id 'm' is not known"})
