"""Endpoints of the SDK that this release does not serve: refused at once, by a status that it does not repeat."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException, Response

from runtime.ingress.deps import Caller

router = APIRouter(prefix="/api/v1")

POSTS = ("auth/token", "create_custom_loss")
READS = ("sessions/{session_id}/trace_export",)
CHANGES = ("sessions/{session_id}/project",)


def not_served(endpoint: str) -> str:
    return f"{endpoint} is not served by this release of tinkerbus"


def _add(endpoint: str, methods: list[str]) -> None:
    async def respond(_: Caller) -> Response:
        raise HTTPException(400, not_served(endpoint))

    router.add_api_route(f"/{endpoint}", respond, methods=methods, name=endpoint)


for _endpoint in POSTS:
    _add(_endpoint, ["POST"])
for _endpoint in READS:
    _add(_endpoint, ["GET"])
for _endpoint in CHANGES:
    _add(_endpoint, ["POST", "PUT", "DELETE"])
