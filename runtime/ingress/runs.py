"""Training runs: the models of a tenant as the REST client lists them, those that have ended included.

One whose creation failed never came to be, and is not listed.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from fastapi import APIRouter, HTTPException, Response

from bus.tables import ModelRow
from runtime.ingress.answers import answer
from runtime.ingress.deps import Caller, Deps, Injected, own_project
from runtime.ingress.stored import Limit, Offset, Stored, checkpoints, described, page, timestamp, visible

router = APIRouter(prefix="/api/v1")

Scope = Literal["owned", "accessible"]
"""`accessible` adds the runs of others that have a public checkpoint."""


@router.get("/training_runs")
async def training_runs(
    tenant: Caller,
    deps: Injected,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Scope = "owned",
    project_id: str | None = None,
) -> Response:
    """Newest first."""
    own_project(tenant, project_id, "project_id")
    stored = _by_model(await checkpoints(deps))
    rows = {str(key): row for key, row in (await deps.tables.models.all()).items()}
    found = sorted(
        (key for key, row in rows.items() if _listed(tenant, row, stored.get(key, ()), access_scope)),
        key=lambda key: (-rows[key].created_at, key),
    )
    shown, cursor = page(found, offset, limit)
    runs = [_run(deps, tenant, key, rows[key], stored.get(key, ())) for key in shown]
    return answer({"training_runs": await asyncio.gather(*runs), "cursor": cursor})


@router.get("/training_runs/{run_id}")
async def training_run(
    run_id: str, tenant: Caller, deps: Injected, access_scope: Scope = "owned"
) -> Response:
    row, stored = await _found(deps, tenant, run_id, access_scope)
    return answer(await _run(deps, tenant, run_id, row, stored))


@router.get("/training_runs/{run_id}/checkpoints")
async def checkpoints_of_run(run_id: str, tenant: Caller, deps: Injected) -> Response:
    """All of one's own run; of another's, those that are public."""
    _, stored = await _found(deps, tenant, run_id, "accessible")
    return answer({"checkpoints": [described(one) for one in stored if visible(tenant, one.row)]})


async def _found(deps: Deps, tenant: str, run_id: str, scope: Scope) -> tuple[ModelRow, Sequence[Stored]]:
    found = await deps.tables.models.get(run_id)
    stored = await checkpoints(deps, run_id)
    if found is None or not _listed(tenant, found[0], stored, scope):
        raise HTTPException(404, f"training run {run_id!r} is not known")
    return found[0], stored


def _listed(tenant: str, row: ModelRow, stored: Sequence[Stored], scope: Scope) -> bool:
    if row.status == "failed":
        return False
    return row.tenant == tenant or (scope == "accessible" and any(one.row.public for one in stored))


def _by_model(stored: Iterable[Stored]) -> dict[str, list[Stored]]:
    found: dict[str, list[Stored]] = defaultdict(list)
    for one in stored:
        found[one.path.model_id].append(one)
    return found


async def _run(
    deps: Deps, tenant: str, run_id: str, row: ModelRow, stored: Sequence[Stored]
) -> dict[str, Any]:
    """The SDK's `TrainingRun`; `stored` is newest first."""
    last = {one.path.kind: described(one) for one in reversed(stored) if visible(tenant, one.row)}
    return {
        "training_run_id": run_id,
        "base_model": row.base_model,
        "model_owner": row.tenant,
        "is_lora": row.lora is not None,
        "corrupted": False,
        "lora_rank": row.lora.rank if row.lora else None,
        "last_request_time": timestamp(await _last_request(deps, run_id, row, stored)),
        "last_checkpoint": last.get("weights"),
        "last_sampler_checkpoint": last.get("sampler_weights"),
        "user_metadata": (row.user_metadata or None) if row.tenant == tenant else None,
    }


async def _last_request(deps: Deps, run_id: str, row: ModelRow, stored: Sequence[Stored]) -> float:
    """When its newest operation got its result."""
    finished = await deps.ledger.last_time(run_id)
    return max([row.created_at, *(one.row.created_at for one in stored), finished or 0.0])
