"""The HTTP application: all routes over one `Deps`.

Holds no state of its own: what one ingress replica accepts, another one answers polls for.
"""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI

from runtime.ingress import (
    checkpoints,
    client,
    copies,
    downloads,
    errors,
    futures,
    models,
    refused,
    runs,
    sample_futures,
    sampling,
    session_views,
    sessions,
    training,
    weights,
)
from runtime.ingress.counting import CountRequests
from runtime.ingress.deps import Deps

AREAS = (
    client,
    sessions,
    session_views,
    models,
    training,
    weights,
    sampling,
    sample_futures,
    futures,
    runs,
    checkpoints,
    downloads,
    copies,
    refused,
)
"""In this order: the refused endpoints hold patterns that would catch others."""


def build(deps: Deps) -> FastAPI:
    """The application. What `deps` holds has to stay open as long as it serves."""
    app = FastAPI(title="tinkerbus", version=version("tinkerbus"), openapi_url=None)
    app.state.deps = deps
    for area in AREAS:
        app.include_router(area.router)
    errors.install(app)
    if deps.recorder is not None:
        app.add_middleware(CountRequests, recorder=deps.recorder)
    return app
