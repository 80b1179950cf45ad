"""Models: create, describe, unload. Creating is operation 0 of the model's own log."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response

from bus.errors import CodecError
from bus.events import CreateModel, UnloadModel
from bus.tables import ModelRow
from runtime import entries
from runtime.ingress.accept import accept
from runtime.ingress.answers import answer, later
from runtime.ingress.body import convert, number_field, read_json, text_field
from runtime.ingress.deps import Caller, Deps, Injected, owned_model, owned_session
from runtime.ingress.requests import ModelRequest
from runtime.ingress.requests import create_model as read_create_model

router = APIRouter(prefix="/api/v1")

LIVE_WITHIN_S = 10.0
"""How long `get_info` waits for a model that is being created; the SDK asks again after that."""
LOOK_EVERY_S = 0.05


@router.post("/create_model")
async def create_model(request: Request, tenant: Caller, deps: Injected) -> Response:
    """Put the creation on the log; what is wrong with it comes back through the future."""
    sent, fields = await read_json(request)
    try:
        wanted: CreateModel | CodecError = read_create_model(fields)
    except CodecError as error:
        wanted = error
    return await begin_model(deps, tenant, sent, fields, wanted)


async def begin_model(
    deps: Deps, tenant: str, sent: bytes, fields: dict[str, Any], wanted: CreateModel | CodecError
) -> Response:
    """Operation 0 of `<session_id>:train:<model_seq_id>`, a name that the SDK works out for itself.

    400 where session or number cannot be read, 404 for an unknown session, 410 for a finished one.
    """
    session_id = text_field(fields, "session_id")
    model_seq_id = number_field(fields, "model_seq_id", 0)
    session = await owned_session(deps, tenant, session_id)
    if session.status == "finished":
        raise HTTPException(410, f"session {session_id!r} is finished")
    model_id = f"{session_id}:train:{model_seq_id}"
    try:
        if isinstance(wanted, CodecError):
            raise wanted
        asked = wanted
        entry = entries.of_op(tenant, model_id, 0, wanted)
    except CodecError as error:
        asked = CreateModel(base_model=str(fields.get("base_model") or ""))
        entry = entries.of_refusal(tenant, model_id, 0, str(error), error.field, sent)
    row = ModelRow(
        tenant=tenant,
        session_id=session_id,
        base_model=asked.base_model,
        lora=asked.lora,
        user_metadata=asked.user_metadata,
        status="creating",
        created_at=time.time(),
    )
    if not await deps.tables.models.create(model_id, row):
        row = await owned_model(deps, tenant, model_id)
    return await accept(deps, row, entry)


@router.post("/get_info")
async def get_info(request: Request, tenant: Caller, deps: Injected) -> Response:
    """What the SDK asks right after a creation. Waits while the model is being made."""
    model_id = await _model_of(request)
    deadline = time.monotonic() + LIVE_WITHIN_S
    while True:
        row = await owned_model(deps, tenant, model_id)
        if row.status == "live":
            return await _info(deps, model_id, row)
        if row.status != "creating":
            raise HTTPException(404, f"model_id {model_id!r} is {row.status}")
        if time.monotonic() > deadline:
            return later(f"model_id {model_id!r} is still being created")
        await asyncio.sleep(LOOK_EVERY_S)


@router.post("/unload_model")
async def unload_model(request: Request, tenant: Caller, deps: Injected) -> Response:
    """End a model once everything sent for it before has run."""
    model_id = await _model_of(request)
    row = await owned_model(deps, tenant, model_id)
    return await accept(deps, row, entries.of_op(tenant, model_id, None, UnloadModel()))


async def _model_of(request: Request) -> str:
    _, fields = await read_json(request)
    text_field(fields, "model_id")
    try:
        return convert(fields, ModelRequest).model_id
    except CodecError as error:
        raise HTTPException(400, str(error)) from error


async def _info(deps: Deps, model_id: str, row: ModelRow) -> Response:
    """`tokenizer_id` is the base model's folder, so that the SDK's get_tokenizer() needs no hub."""
    group = await deps.tables.groups.get(deps.log.group)
    served = group[0] if group is not None and group[0].base_model == row.base_model else None
    return answer(
        {
            "type": "get_info",
            "model_id": model_id,
            "model_name": row.base_model,
            "model_data": {
                "arch": served.arch if served else None,
                "model_name": row.base_model,
                "tokenizer_id": served.model_dir if served else None,
            },
            "optimizer_config": {"type": "adamw"},
            "is_lora": row.lora is not None,
            "lora_rank": row.lora.rank if row.lora else None,
        }
    )
