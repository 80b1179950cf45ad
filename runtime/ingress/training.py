"""The training verbs: `forward` and `forward_backward` (one endpoint as protobuf, two as JSON), `optim_step` (JSON).

Both are checked as far as the log needs, stored, and answered with a future. What is wrong inside comes back
through that future, for this request alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response

from bus.codec import JSON, PROTOBUF, datum_sizes, encode, peek_forward_backward, peek_forward_only
from bus.errors import CodecError
from bus.events import ForwardBackward
from bus.log import LogEntry
from runtime import entries
from runtime.ingress import json_passes
from runtime.ingress.accept import accept, accept_json
from runtime.ingress.body import read_body, read_json
from runtime.ingress.deps import Caller, Deps, Injected, owned_model
from runtime.ingress.off_loop import off_loop
from runtime.ingress.requests import optim_step as read_optim_step

router = APIRouter(prefix="/api/v1")


@router.post("/forward_backward")
async def forward_backward(request: Request, tenant: Caller, deps: Injected) -> Response:
    """The body goes onto the log as it came. 400 where it does not parse or names no model and number."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == JSON:
        return await _json_pass(request, tenant, deps, entries.FORWARD_BACKWARD, json_passes.forward_backward)
    if kind != PROTOBUF:
        raise HTTPException(400, f"Content-Type is {kind!r}, but forward_backward takes {PROTOBUF} or {JSON}")
    body = await read_body(request, deps.settings.http.max_body_bytes)
    try:
        limit = deps.settings.limits.max_datum_bytes
        entry = await off_loop(len(body), _entry, tenant, body, limit)
    except CodecError as error:
        raise HTTPException(400, str(error)) from error
    row = await owned_model(deps, tenant, entry.model_id)
    return await accept(deps, row, entry)


@router.post("/forward")
async def forward(request: Request, tenant: Caller, deps: Injected) -> Response:
    """As JSON alone: newer SDKs ask `forward_backward` for it."""
    return await _json_pass(request, tenant, deps, entries.FORWARD, json_passes.forward)


@router.post("/optim_step")
async def optim_step(request: Request, tenant: Caller, deps: Injected) -> Response:
    sent, fields = await read_json(request)
    return await accept_json(deps, tenant, "optim_step", sent, fields, read_optim_step)


async def _json_pass(
    request: Request,
    tenant: str,
    deps: Deps,
    verb: str,
    read: Callable[[dict[str, Any]], ForwardBackward],
) -> Response:
    sent, fields = await read_json(request, deps.settings.http.max_body_bytes)
    limit = deps.settings.limits.max_datum_bytes
    outcome = await off_loop(len(sent), _read, fields, read, limit)

    def given(_: dict[str, Any]) -> ForwardBackward:
        if isinstance(outcome, CodecError):
            raise outcome
        return outcome

    return await accept_json(deps, tenant, verb, sent, fields, given)


def _read(
    fields: dict[str, Any], read: Callable[[dict[str, Any]], ForwardBackward], max_datum_bytes: int
) -> ForwardBackward | CodecError:
    try:
        op = read(fields)
    except CodecError as error:
        return error
    return entries.too_large([len(encode(datum)) for datum in op.data], max_datum_bytes) or op


def _entry(tenant: str, body: bytes, max_datum_bytes: int) -> LogEntry:
    """The request as it came, or its refusal where a datum is too large."""
    model_id, seq_id = peek_forward_backward(body)
    if 0 < max_datum_bytes < len(body) and (wrong := entries.too_large(datum_sizes(body), max_datum_bytes)):
        verb = entries.FORWARD if peek_forward_only(body) else entries.FORWARD_BACKWARD
        return entries.of_refusal(tenant, model_id, seq_id, str(wrong), wrong.field, body, verb=verb)
    return entries.of_sdk_body(tenant, model_id, seq_id, body)
