"""Checkpoints: list, describe, delete, publish, let expire.

A checkpoint's row goes before its folder does: what is listed is always whole.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
from fastapi import APIRouter, HTTPException, Request, Response

from bus.errors import CodecError
from runtime.checkpoints import folder as checkpoint_folder
from runtime.checkpoints import paths
from runtime.checkpoints.paths import CheckpointPath
from runtime.ingress.answers import answer
from runtime.ingress.body import convert, read_json, text_field
from runtime.ingress.deps import Caller, Deps, Injected
from runtime.ingress.requests import CheckpointTtlRequest, WeightsInfoRequest
from runtime.ingress.stored import Limit, Offset, checkpoints, described, owned, page, path_of, readable

router = APIRouter(prefix="/api/v1")

SHORTEST_TTL_S, LONGEST_TTL_S = 3600, 10 * 365 * 86400


@router.get("/checkpoints")
async def own_checkpoints(tenant: Caller, deps: Injected, limit: Limit = 100, offset: Offset = 0) -> Response:
    """Of all runs of the tenant, newest first."""
    found = [stored for stored in await checkpoints(deps) if stored.row.tenant == tenant]
    shown, cursor = page(found, offset, limit)
    return answer({"checkpoints": [described(stored) for stored in shown], "cursor": cursor})


@router.post("/weights_info")
async def weights_info(request: Request, tenant: Caller, deps: Injected) -> Response:
    """What a client needs to make a model that the weights fit."""
    _, fields = await read_json(request)
    text_field(fields, "tinker_path")
    try:
        path = paths.parse(convert(fields, WeightsInfoRequest).tinker_path)
    except ValueError as error:
        raise HTTPException(400, str(error)) from error
    row = await readable(deps, tenant, path)
    lora = row.lora
    return answer(
        {
            "base_model": row.base_model,
            "is_lora": lora is not None,
            "lora_rank": lora.rank if lora else None,
            "train_unembed": lora.train_unembed if lora else None,
            "train_mlp": lora.train_mlp if lora else None,
            "train_attn": lora.train_attn if lora else None,
            "optimizer_config": {"type": "adamw"},
        }
    )


@router.post("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/publish")
async def publish(run_id: str, checkpoint_id: str, tenant: Caller, deps: Injected) -> Response:
    """Every tenant may read it from now on. Again is the same: on 409 the SDK would ask for minutes."""
    await _set_public(deps, tenant, path_of(run_id, checkpoint_id), True)
    return answer({"status": "published"})


@router.delete("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/publish")
async def unpublish(run_id: str, checkpoint_id: str, tenant: Caller, deps: Injected) -> Response:
    await _set_public(deps, tenant, path_of(run_id, checkpoint_id), False)
    return answer({"status": "private"})


@router.put("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/ttl")
async def set_ttl(
    request: Request, run_id: str, checkpoint_id: str, tenant: Caller, deps: Injected
) -> Response:
    """From now on; null keeps it."""
    path = path_of(run_id, checkpoint_id)
    await owned(deps, tenant, path)
    _, fields = await read_json(request)
    try:
        expires_at = expiry(convert(fields, CheckpointTtlRequest).ttl_seconds)
    except CodecError as error:
        raise HTTPException(400, str(error)) from error
    await deps.tables.checkpoints.change(
        path, lambda row: msgspec.structs.replace(row, expires_at=expires_at)
    )
    return answer({"expires_at": expires_at})


@router.delete("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}")
async def delete(run_id: str, checkpoint_id: str, tenant: Caller, deps: Injected) -> Response:
    """404 where there is none (any more)."""
    path = path_of(run_id, checkpoint_id)
    await owned(deps, tenant, path)
    while (found := await deps.tables.checkpoints.get(path)) is not None:
        row, revision = found
        if await deps.tables.checkpoints.delete(path, revision):
            await asyncio.to_thread(checkpoint_folder.remove, row.url)
            break
    return answer({"status": "deleted"})


def expiry(ttl_seconds: int | None, field: str = "ttl_seconds") -> float | None:
    """Seconds since 1970; None for None. Raises CodecError for what is out of range."""
    if ttl_seconds is None:
        return None
    if not SHORTEST_TTL_S <= ttl_seconds <= LONGEST_TTL_S:
        raise CodecError(
            f"{field} is {ttl_seconds}, but has to be from {SHORTEST_TTL_S} (an hour) to {LONGEST_TTL_S} (10 years)",
            field,
        )
    return time.time() + ttl_seconds


async def _set_public(deps: Deps, tenant: str, path: CheckpointPath, public: bool) -> None:
    await owned(deps, tenant, path)
    await deps.tables.checkpoints.change(path, lambda row: msgspec.structs.replace(row, public=public))
