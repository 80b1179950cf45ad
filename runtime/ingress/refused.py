"""Endpoints of the SDK that this release does not serve.

Those that take a number of a model's sequence go onto the log as refusals, so that the number is used up and what
follows is not held up; the rest are refused at once, with a status that the SDK does not repeat.
"""

from __future__ import annotations

from fastapi import APIRouter, HTTPException, Request, Response

from runtime.ingress.accept import accept_json, refuse
from runtime.ingress.body import read_json
from runtime.ingress.deps import Caller, Injected

router = APIRouter(prefix="/api/v1")

NUMBERED = ("forward",)
POSTS = (
    "auth/token",
    "copy_weights",
    "create_custom_loss",
    "sessions/search",
    "weights_info",
)
READS = (
    "checkpoints",
    "sessions",
    "sessions/{session_id}",
    "sessions/{session_id}/trace_export",
    "training_runs",
    "training_runs/{run_id:path}",
)
CHANGES = ("sessions/{session_id}/project", "training_runs/{run_id:path}")


def not_served(endpoint: str) -> str:
    return f"{endpoint} is not served by this release of tinkerbus"


def _add_numbered(endpoint: str) -> None:
    async def respond(request: Request, tenant: Caller, deps: Injected) -> Response:
        sent, fields = await read_json(request)
        return await accept_json(deps, tenant, endpoint, sent, fields, refuse(not_served(endpoint)))

    router.add_api_route(f"/{endpoint}", respond, methods=["POST"], name=endpoint)


def _add_unnumbered(endpoint: str, methods: list[str]) -> None:
    async def respond(_: Caller) -> Response:
        raise HTTPException(400, not_served(endpoint))

    router.add_api_route(f"/{endpoint}", respond, methods=methods, name=endpoint)


for _endpoint in NUMBERED:
    _add_numbered(_endpoint)
for _endpoint in POSTS:
    _add_unnumbered(_endpoint, ["POST"])
for _endpoint in READS:
    _add_unnumbered(_endpoint, ["GET"])
for _endpoint in CHANGES:
    _add_unnumbered(_endpoint, ["POST", "PUT", "DELETE"])
