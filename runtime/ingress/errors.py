"""Every way a request can fail, as JSON with a `detail` that a person can act on.

A queue that is full, and a broker that is full or away, become 429: nothing was accepted, and the SDK waits before it
asks again (on 5xx its polls come back at once). A client's mistake is never 5xx, which the SDK repeats for ever.
"""

from __future__ import annotations

import logging

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as RoutingError

from bus.connection import BrokerError, MessageTooLarge
from bus.log import LogFull
from runtime.admission import QueueFull
from runtime.ingress.answers import full, later, refusal

logger = logging.getLogger("tinkerbus.ingress")


def install(app: FastAPI) -> None:
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RoutingError, _not_routed)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(MessageTooLarge, _too_large)
    app.add_exception_handler(QueueFull, _full)
    app.add_exception_handler(LogFull, _later)
    app.add_exception_handler(BrokerError, _later)
    app.add_exception_handler(Exception, _failed)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return refusal(error.status_code, str(error.detail), dict(error.headers or {}))


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, RoutingError)
    what = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return refusal(404, f"{what} is not an endpoint of this server")
    return refusal(error.status_code, f"{what}: {error.detail}", dict(error.headers or {}))


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    return refusal(400, f"{field} is wrong: {first['msg']}")


async def _too_large(_: Request, error: Exception) -> Response:
    return refusal(413, str(error))


async def _full(_: Request, error: Exception) -> Response:
    return full(str(error))


async def _later(_: Request, error: Exception) -> Response:
    return later(str(error))


async def _failed(request: Request, error: Exception) -> Response:
    """A fault of ours. The traceback is for the log alone; Starlette raises the error once more after this."""
    return refusal(500, f"{request.method} {request.url.path} failed in the server; its log says why")
