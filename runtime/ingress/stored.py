"""Checkpoints as their table has them: who may see one, and how it looks on the wire.

One that has expired counts as deleted. One of another tenant is there for who reads it while it is public, and is
answered like what does not exist otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, NamedTuple, TypeVar, cast

from fastapi import HTTPException, Query

from bus.tables import CheckpointRow
from runtime.checkpoints import paths
from runtime.checkpoints.paths import CheckpointPath
from runtime.ingress.deps import Deps

T = TypeVar("T")

MOST_A_PAGE = 1000

Limit = Annotated[int, Query(ge=1, le=MOST_A_PAGE)]
Offset = Annotated[int, Query(ge=0, le=2**53)]

_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


class Stored(NamedTuple):
    path: CheckpointPath
    row: CheckpointRow


async def checkpoints(deps: Deps, model_id: str | None = None) -> list[Stored]:
    """Of every tenant, or of one model; newest first."""
    now = time.time()
    rows = await deps.tables.checkpoints.all(None if model_id is None else (model_id,))
    found = [
        Stored(CheckpointPath(*cast(CheckpointPath, key)), row)
        for key, row in rows.items()
        if not expired(row, now)
    ]
    return sorted(found, key=lambda stored: (-stored.row.created_at, stored.path))


def expired(row: CheckpointRow, now: float) -> bool:
    return row.expires_at is not None and row.expires_at <= now


def visible(tenant: str, row: CheckpointRow) -> bool:
    return row.public or row.tenant == tenant


async def readable(deps: Deps, tenant: str, path: CheckpointPath) -> CheckpointRow:
    """The tenant's checkpoint, or a public one. 404 where there is none."""
    found = await deps.tables.checkpoints.get(path)
    if found is None or expired(found[0], time.time()) or not visible(tenant, found[0]):
        raise HTTPException(404, f"checkpoint {str(path)!r} is not known")
    return found[0]


async def owned(deps: Deps, tenant: str, path: CheckpointPath) -> CheckpointRow:
    """The tenant's own. 404 where there is none."""
    row = await readable(deps, tenant, path)
    if row.tenant != tenant:
        raise HTTPException(404, f"checkpoint {str(path)!r} is not known")
    return row


def path_of(model_id: str, checkpoint_id: str) -> CheckpointPath:
    """From a URL. 400 where it names no checkpoint."""
    try:
        return paths.of_checkpoint(model_id, checkpoint_id)
    except ValueError as error:
        raise HTTPException(400, str(error)) from error


def described(stored: Stored) -> dict[str, Any]:
    """The SDK's `Checkpoint`."""
    path, row = stored
    return {
        "checkpoint_id": path.checkpoint_id,
        "checkpoint_type": _TYPES[path.kind],
        "time": timestamp(row.created_at),
        "tinker_path": str(path),
        "size_bytes": row.size_bytes,
        "public": row.public,
        "user_metadata": row.user_metadata or None,
        "expires_at": None if row.expires_at is None else timestamp(row.expires_at),
    }


def timestamp(seconds: float) -> str:
    """ISO 8601, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def page(items: Sequence[T], offset: int, limit: int) -> tuple[Sequence[T], dict[str, int]]:
    """So many of them, and the cursor that says how many there are."""
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}
