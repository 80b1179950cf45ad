"""Sessions: what a `ServiceClient` opens, keeps alive by heartbeats, and finishes with its models."""

from __future__ import annotations

import secrets
import time

from fastapi import APIRouter, HTTPException, Request, Response

from bus.errors import CodecError
from bus.events import UnloadModel
from bus.tables import ModelRow, SessionRow
from runtime import entries, session_end
from runtime.ingress.accept import accept
from runtime.ingress.answers import answer
from runtime.ingress.body import convert, read_json, text_field
from runtime.ingress.deps import Caller, Injected, own_project, owned_session
from runtime.ingress.requests import CreateSessionRequest, FinishSessionRequest, HeartbeatRequest, as_text

router = APIRouter(prefix="/api/v1")


@router.post("/create_session")
async def create_session(request: Request, tenant: Caller, deps: Injected) -> Response:
    """A new session; its id is random, so that no two clients ever share one."""
    _, fields = await read_json(request)
    try:
        wanted = convert(fields, CreateSessionRequest)
    except CodecError as error:
        raise HTTPException(400, str(error)) from error
    own_project(tenant, wanted.project_id, "project_id")
    session_id = f"s-{secrets.token_hex(12)}"
    row = SessionRow(
        tenant=tenant,
        created_at=time.time(),
        status="live",
        tags=tuple(wanted.tags),
        user_metadata=as_text(wanted.user_metadata),
        display_name=wanted.display_name,
        sdk_version=wanted.sdk_version,
    )
    await deps.tables.sessions.create(session_id, row)
    return answer({"session_id": session_id, "type": "create_session"})


@router.post("/session_heartbeat")
async def session_heartbeat(request: Request, tenant: Caller, deps: Injected) -> Response:
    """410 ends the client's heartbeats: the session is over."""
    _, fields = await read_json(request)
    text_field(fields, "session_id")
    try:
        session_id = convert(fields, HeartbeatRequest).session_id
    except CodecError as error:
        raise HTTPException(400, str(error)) from error
    row = await owned_session(deps, tenant, session_id)
    if row.status == "finished":
        raise HTTPException(410, f"session {session_id!r} is finished")
    await deps.heartbeats.heard(session_id)
    return answer({"type": "session_heartbeat"})


@router.post("/sessions/{session_id}/finish")
async def finish(request: Request, session_id: str, tenant: Caller, deps: Injected) -> Response:
    """End a session, and each of its models once what was sent for it has run. Again is the same."""
    await owned_session(deps, tenant, session_id)
    _, fields = await read_json(request)
    try:
        said = convert(fields, FinishSessionRequest)
    except CodecError as error:
        raise HTTPException(400, str(error)) from error
    reason = said.reason.type if said.reason else "success"

    async def unload(model_id: str, row: ModelRow) -> None:
        await accept(deps, row, entries.of_op(tenant, model_id, None, UnloadModel()))

    await session_end.end(deps.tables, session_id, unload, reason=reason, detail=said.detail)
    return answer({"status": "finished"})
