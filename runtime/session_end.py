"""The end of a session, said by its client or found by its silence: its samplers go, its models once they are done."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

from msgspec.structs import replace

from bus.tables import ModelRow, SessionRow, Tables


async def end(
    tables: Tables,
    session_id: str,
    unload: Callable[[str, ModelRow], Awaitable[None]],
    *,
    reason: Literal["success", "errored", "interrupted", "expired"],
    detail: str | None = None,
) -> None:
    """Idempotent: the first reason stays. `unload` puts a model's end on the log, behind what was sent before."""

    def finished(row: SessionRow) -> SessionRow:
        return (
            row if row.status == "finished" else replace(row, status="finished", reason=reason, detail=detail)
        )

    await tables.sessions.change(session_id, finished)
    for sampler_id, sampler in (await tables.samplers.all()).items():
        if sampler.session_id == session_id:
            await tables.samplers.delete(sampler_id)
    for model_id, model in (await tables.models.all()).items():
        if model.session_id == session_id and model.status in ("creating", "live"):
            await unload(str(model_id), model)
    await tables.heartbeats.delete(session_id)
