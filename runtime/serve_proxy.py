"""What Serve's HTTP proxy answers for us while it does not know our routes yet.

It listens before the applications are deployed, also when everything starts again after a crash, and says 404 to
every path then. Clients that were there before the crash take a 404 as the last word on their request. So it becomes
what the ingress answers when it is not able to serve: 429, ask again.
"""

from __future__ import annotations

from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.ingress.answers import later


def middlewares() -> list[Middleware]:
    """Serve calls this in each proxy process: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH."""
    return [Middleware(NotYet)]


class NotYet:
    """See the module. The ingress's own 404s are JSON, and pass."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        instead = False

        async def passed_on(message: Message) -> None:
            nonlocal instead
            if message["type"] == "http.response.start" and _is_the_proxys(message):
                instead = True
                await later("the service is starting")(scope, receive, send)
            elif not instead:
                await send(message)

        await self._app(scope, receive, passed_on if scope["type"] == "http" else send)


def _is_the_proxys(start: Message) -> bool:
    headers: Any = start.get("headers", ())
    kinds = [bytes(value) for name, value in headers if bytes(name).lower() == b"content-type"]
    return start["status"] == 404 and bool(kinds) and kinds[0].startswith(b"text/plain")
