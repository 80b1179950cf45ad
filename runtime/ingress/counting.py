"""Counting requests, by route template and class of status: labels stay bounded whatever clients ask for."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from observability.recorder import Recorder

REQUESTS = "tinkerbus_ingress_requests_total"
UNROUTED = "unrouted"


class CountRequests:
    """ASGI middleware around all routes."""

    def __init__(self, app: ASGIApp, recorder: Recorder) -> None:
        self._app = app
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            self._recorder.inc(REQUESTS, route=template(scope), status=f"{status // 100}xx")


def template(scope: MutableMapping[str, Any]) -> str:
    """The path as its route declares it, `/api/v1/sessions/{session_id}/finish`."""
    return str(getattr(scope.get("route"), "path", UNROUTED))
