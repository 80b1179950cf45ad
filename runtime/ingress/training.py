"""The training verbs: `forward` and `forward_backward` (one endpoint, protobuf), `optim_step` (JSON).

Both are checked as far as the log needs, stored, and answered with a future. What is wrong inside comes back
through that future, for this request alone.
"""

from __future__ import annotations

from fastapi import APIRouter, HTTPException, Request, Response

from bus.codec import JSON, PROTOBUF, datum_sizes, peek_forward_backward, peek_forward_only
from bus.errors import CodecError
from bus.log import LogEntry
from runtime import entries
from runtime.ingress.accept import accept, accept_json, refuse
from runtime.ingress.body import read_body, read_json
from runtime.ingress.deps import Caller, Injected, owned_model
from runtime.ingress.off_loop import off_loop
from runtime.ingress.requests import optim_step as read_optim_step

router = APIRouter(prefix="/api/v1")


@router.post("/forward_backward")
async def forward_backward(request: Request, tenant: Caller, deps: Injected) -> Response:
    """The body goes onto the log as it came. 400 where it does not parse or names no model and number."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != PROTOBUF:
        wrong = f"Content-Type is {kind!r}, but forward_backward takes {PROTOBUF}: use tinker 0.38 or newer"
        if kind != JSON:
            raise HTTPException(400, wrong)
        sent, fields = await read_json(request)
        return await accept_json(
            deps, tenant, entries.FORWARD_BACKWARD, sent, fields, refuse(wrong, "Content-Type")
        )
    body = await read_body(request, deps.settings.http.max_body_bytes)
    try:
        limit = deps.settings.limits.max_datum_bytes
        entry = await off_loop(len(body), _entry, tenant, body, limit)
    except CodecError as error:
        raise HTTPException(400, str(error)) from error
    row = await owned_model(deps, tenant, entry.model_id)
    return await accept(deps, row, entry)


@router.post("/optim_step")
async def optim_step(request: Request, tenant: Caller, deps: Injected) -> Response:
    sent, fields = await read_json(request)
    return await accept_json(deps, tenant, "optim_step", sent, fields, read_optim_step)


def _entry(tenant: str, body: bytes, max_datum_bytes: int) -> LogEntry:
    """The request as it came, or its refusal where a datum is too large."""
    model_id, seq_id = peek_forward_backward(body)
    if 0 < max_datum_bytes < len(body) and (wrong := entries.too_large(datum_sizes(body), max_datum_bytes)):
        verb = entries.FORWARD if peek_forward_only(body) else entries.FORWARD_BACKWARD
        return entries.of_refusal(tenant, model_id, seq_id, str(wrong), wrong.field, body, verb=verb)
    return entries.of_sdk_body(tenant, model_id, seq_id, body)
