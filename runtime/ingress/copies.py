"""Copies of checkpoints: a folder and a row of their own, in a run that takes no operations.

Asked again, as the SDK does when an answer was lost, the same copy is named: its run follows from the request's
idempotency key, or from the session and number that it is to have.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time

from fastapi import APIRouter, HTTPException, Request, Response
from msgspec.structs import replace

from bus.tables import CheckpointRow, ModelRow
from runtime.checkpoints import folder as checkpoint_folder
from runtime.checkpoints import paths
from runtime.checkpoints.paths import CheckpointPath
from runtime.ingress.answers import answer, later
from runtime.ingress.body import convert, number_field, read_json, text_field
from runtime.ingress.checkpoints import expiry
from runtime.ingress.deps import Caller, Deps, Injected, own_project, owned_session
from runtime.ingress.requests import CopyWeightsRequest
from runtime.ingress.stored import readable

router = APIRouter(prefix="/api/v1")


@router.post("/copy_weights")
async def copy_weights(request: Request, tenant: Caller, deps: Injected) -> Response:
    """Of one's own checkpoint, or a public one. The copy is private."""
    _, fields = await read_json(request)
    text_field(fields, "source_path")
    if "x-tinker-weights-access-token" in request.headers:
        raise HTTPException(
            400, "header x-tinker-weights-access-token is not honoured here: have the checkpoint published"
        )
    try:
        wanted = convert(fields, CopyWeightsRequest)
        source = paths.parse(wanted.source_path)
        expires_at = expiry(wanted.ttl_seconds)
    except ValueError as error:
        raise HTTPException(400, str(error)) from error
    row = await readable(deps, tenant, source)
    run_id, session_id = await _destination(deps, tenant, request, wanted)
    path = source._replace(model_id=run_id)
    await _claim(deps, tenant, run_id, session_id, row)
    if (await deps.tables.checkpoints.get(path)) is None:
        copied = replace(row, tenant=tenant, created_at=time.time(), expires_at=expires_at, public=False)
        try:
            await _copy(deps, path, copied)
        except FileNotFoundError:
            raise HTTPException(404, f"checkpoint {str(source)!r} is not known") from None
        except OSError as error:
            return later(f"the checkpoint cannot be copied now: {error.strerror}")
    return answer({"tinker_path": str(path)})


async def _destination(
    deps: Deps, tenant: str, request: Request, wanted: CopyWeightsRequest
) -> tuple[str, str | None]:
    """The copy's run, and its session."""
    if wanted.session_id is None:
        if wanted.destination_project_id is None:
            raise HTTPException(400, "destination_project_id is missing, or session_id and model_seq_id")
        own_project(tenant, wanted.destination_project_id, "destination_project_id")
        key = request.headers.get("x-idempotency-key") or secrets.token_hex(16)
        said = "\0".join((tenant, key, wanted.source_path, str(wanted.ttl_seconds)))
        return f"copy-{hashlib.sha256(said.encode('utf-8', 'surrogatepass')).hexdigest()[:24]}", None
    if wanted.destination_project_id is not None:
        raise HTTPException(400, "destination_project_id and session_id are both given: send one")
    number = number_field({"model_seq_id": wanted.model_seq_id}, "model_seq_id", 0)
    session = await owned_session(deps, tenant, wanted.session_id)
    if session.status == "finished":
        raise HTTPException(410, f"session {wanted.session_id!r} is finished")
    return f"{wanted.session_id}:train:{number}", wanted.session_id


async def _claim(deps: Deps, tenant: str, run_id: str, session_id: str | None, source: CheckpointRow) -> None:
    """Make the run. 400 where a model has that id."""
    run = ModelRow(
        tenant=tenant,
        base_model=source.base_model,
        created_at=time.time(),
        session_id=session_id,
        lora=source.lora,
        status="unloaded",
        copy=True,
    )
    if not await deps.tables.models.create(run_id, run):
        found = await deps.tables.models.get(run_id)
        if found is None or found[0].tenant != tenant or not found[0].copy:
            raise HTTPException(400, f"model_id {run_id!r} is taken: choose another model_seq_id")


async def _copy(deps: Deps, path: CheckpointPath, row: CheckpointRow) -> None:
    """Folder first, then the row: what is listed is whole. Raises OSError."""
    folder = checkpoint_folder.beside(row.url, path, secrets.token_hex(8))
    made = False
    try:
        await asyncio.to_thread(checkpoint_folder.copy, row.url, folder)
        made = await deps.tables.checkpoints.create(path, replace(row, url=folder))
    finally:
        if not made:  # it failed, or another try was quicker
            await asyncio.to_thread(checkpoint_folder.remove, folder)
