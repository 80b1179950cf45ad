"""What every route works with, and who is asking.

A request's tenant follows from its API key alone. What another tenant owns is answered like what does not
exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, HTTPException, Request

from bus.connection import Bus
from bus.ledger import Ledger
from bus.log import OpsLog
from bus.results import Results
from bus.tables import ModelRow, SessionRow, Tables
from observability.recorder import Recorder
from runtime.admission import Admission
from runtime.config import Settings
from runtime.ingress.heartbeats import Heartbeats
from runtime.keys import Keys

LARGE_AT_ONCE = 2
"""Large bodies on the way to the broker at a time, over the one connection that everything else uses too."""


@dataclass(frozen=True, slots=True)
class Deps:
    """What the routes are built over; one per ingress process."""

    settings: Settings
    bus: Bus
    log: OpsLog
    results: Results
    tables: Tables
    ledger: Ledger
    admission: Admission
    keys: Keys
    heartbeats: Heartbeats
    ready: Callable[[], Awaitable[str | None]]
    """None when requests can be served, else what is missing."""
    recorder: Recorder | None = None
    large: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LARGE_AT_ONCE))
    """Held while a large body goes to the broker: what is small, as a heartbeat, never queues behind many."""


async def deps_of(request: Request) -> Deps:
    deps: Deps = request.app.state.deps
    return deps


async def tenant_of(request: Request) -> str:
    """The tenant of the request's `x-api-key`. 401 without a known key."""
    key = request.headers.get("x-api-key")
    if not key:
        raise HTTPException(401, "header x-api-key is missing: send one of this server's API keys")
    deps: Deps = request.app.state.deps
    tenant = deps.keys.tenant_of(key)
    if tenant is None:
        raise HTTPException(401, "header x-api-key holds no key of this server")
    return tenant


Injected = Annotated[Deps, Depends(deps_of)]
Caller = Annotated[str, Depends(tenant_of)]


async def owned_session(deps: Deps, tenant: str, session_id: str) -> SessionRow:
    """The tenant's session. 404 where there is none of that id."""
    found = await deps.tables.sessions.get(session_id) if session_id else None
    if found is None or found[0].tenant != tenant:
        raise HTTPException(404, f"session_id {session_id!r} is not known")
    return found[0]


async def owned_model(deps: Deps, tenant: str, model_id: str) -> ModelRow:
    """The tenant's model. 404 where there is none of that id."""
    found = await deps.tables.models.get(model_id) if model_id else None
    if found is None or found[0].tenant != tenant:
        raise HTTPException(404, f"model_id {model_id!r} is not known")
    return found[0]


def own_project(tenant: str, project_id: str | None, field: str) -> None:
    """400 for a project that does not exist: a tenant has one, called as itself."""
    if project_id is not None and project_id != tenant:
        raise HTTPException(
            400, f"{field} {project_id!r} is not known: a tenant has one project here, {tenant!r}"
        )
