"""Sessions of a tenant, listed and searched, newest first; those that have ended included."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Literal

from fastapi import APIRouter, HTTPException, Request, Response

from bus.errors import CodecError
from bus.tables import SessionRow
from runtime.ingress.answers import answer
from runtime.ingress.body import convert, read_json
from runtime.ingress.deps import Caller, Deps, Injected, own_project, owned_session
from runtime.ingress.requests import SearchStatus, SessionSearchRequest
from runtime.ingress.stored import Limit, Offset, checkpoints, page, timestamp

router = APIRouter(prefix="/api/v1")

Scope = Literal["owned", "accessible"]
"""The same here: nobody sees a session of another tenant."""


@router.get("/sessions")
async def sessions(
    tenant: Caller, deps: Injected, limit: Limit = 20, offset: Offset = 0, access_scope: Scope = "owned"
) -> Response:
    del access_scope
    found = [session_id for session_id, _ in await _own(deps, tenant)]
    return answer({"sessions": page(found, offset, limit)[0]})


@router.get("/sessions/{session_id}")
async def session(session_id: str, tenant: Caller, deps: Injected, access_scope: Scope = "owned") -> Response:
    del access_scope
    row = await owned_session(deps, tenant, session_id)
    models = await deps.tables.models.all()
    samplers = await deps.tables.samplers.all()
    return answer(
        {
            "training_run_ids": sorted(
                str(key)
                for key, model in models.items()
                if model.session_id == session_id and model.status != "failed"
            ),
            "sampler_ids": sorted(
                str(key) for key, sampler in samplers.items() if sampler.session_id == session_id
            ),
            "user_metadata": row.user_metadata or None,
            "display_name": row.display_name,
        }
    )


@router.post("/sessions/search")
async def search(request: Request, tenant: Caller, deps: Injected) -> Response:
    """One page of the sessions that match."""
    _, fields = await read_json(request)
    try:
        wanted = _checked(convert(fields, SessionSearchRequest))
    except CodecError as error:
        raise HTTPException(400, str(error)) from error
    for project_id in wanted.project_ids or ():
        own_project(tenant, project_id, "project_ids")
    found = [
        (session_id, row)
        for session_id, row in await _own(deps, tenant)
        if _matches(wanted, tenant, session_id, row) and _behind(wanted, session_id, row)
    ]
    shown = found[: wanted.limit]
    held = await _holdings(deps, tenant)
    last = shown[-1] if len(shown) < len(found) else None
    return answer(
        {
            "sessions": [_summary(tenant, session_id, row, held[session_id]) for session_id, row in shown],
            "next_cursor": {"last_created_at": timestamp(last[1].created_at), "last_session_id": last[0]}
            if last
            else None,
        }
    )


async def _own(deps: Deps, tenant: str) -> list[tuple[str, SessionRow]]:
    rows = (await deps.tables.sessions.all()).items()
    found = [(str(session_id), row) for session_id, row in rows if row.tenant == tenant]
    return sorted(found, key=lambda one: _place(*one))


def _place(session_id: str, row: SessionRow) -> tuple[float, str]:
    """In the order of lists. Rounded as the cursor is, so that a page begins where the last one ended."""
    return -round(row.created_at, 6), session_id


def _checked(wanted: SessionSearchRequest) -> SessionSearchRequest:
    """Raises CodecError for what the SDK's own type would not let through."""
    if wanted.display_name == "":
        raise CodecError("display_name is empty", "display_name")
    if wanted.statuses == []:
        raise CodecError("statuses is empty: leave it out to match every status", "statuses")
    if (wanted.owner.type == "user") != (wanted.owner.owner_urns is not None):
        raise CodecError(
            "owner.owner_urns goes with owner.type 'user', and with that alone", "owner.owner_urns"
        )
    if wanted.cursor is not None and wanted.cursor.last_created_at.tzinfo is None:
        raise CodecError("cursor.last_created_at has no time zone", "cursor.last_created_at")
    return wanted


def _matches(wanted: SessionSearchRequest, tenant: str, session_id: str, row: SessionRow) -> bool:
    if wanted.owner.owner_urns is not None and tenant not in wanted.owner.owner_urns:
        return False
    if wanted.session_id is not None or wanted.display_name is not None:
        words = (wanted.display_name or "").lower().split()
        named = wanted.display_name is not None and all(
            word in (row.display_name or "").lower() for word in words
        )
        if not named and session_id != wanted.session_id:
            return False
    if any(row.user_metadata.get(key) != value for key, value in wanted.user_metadata.items()):
        return False
    return wanted.statuses is None or any(_has(row, status) for status in wanted.statuses)


def _has(row: SessionRow, status: SearchStatus) -> bool:
    if status.type == "active":
        return row.status == "live"
    if status.type == "client_finished":
        said = row.reason if row.reason != "expired" else None
        return said is not None and (status.reasons is None or said in status.reasons)
    return False  # nothing here cancels or fails a session


def _behind(wanted: SessionSearchRequest, session_id: str, row: SessionRow) -> bool:
    if wanted.cursor is None:
        return True
    cursor = (-round(wanted.cursor.last_created_at.timestamp(), 6), wanted.cursor.last_session_id)
    return _place(session_id, row) > cursor


async def _holdings(deps: Deps, tenant: str) -> dict[str, list[int]]:
    """Bytes of every checkpoint, by the session whose model saved it."""
    models = await deps.tables.models.all()
    held: dict[str, list[int]] = defaultdict(list)
    for stored in await checkpoints(deps):
        model = models.get(stored.path.model_id)
        if stored.row.tenant == tenant and model is not None and model.session_id is not None:
            held[model.session_id].append(stored.row.size_bytes)
    return held


def _summary(tenant: str, session_id: str, row: SessionRow, held: list[int]) -> dict[str, Any]:
    """The SDK's `SessionSummary`; one that expired has no status, as its client said nothing."""
    status: dict[str, Any] | None = None
    if row.status == "live":
        status = {"type": "active"}
    elif row.reason not in (None, "expired"):
        status = {"type": "client_finished", "reason": {"type": row.reason}, "detail": row.detail}
    return {
        "session_id": session_id,
        "created_at": timestamp(row.created_at),
        "owner": tenant,
        "project_id": tenant,
        "status": status,
        "checkpoints_count": len(held),
        "display_name": row.display_name,
        "user_metadata": row.user_metadata or None,
        "checkpoint_storage_bytes": sum(held),
    }
