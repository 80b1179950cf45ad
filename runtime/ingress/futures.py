"""Polling for results.

A poll is held until the result is there or the poll's time is up: the SDK asks again at once, without a pause. A
result read by a client that then hung up is still there for the next one.
"""

from __future__ import annotations

from typing import assert_never

from fastapi import APIRouter, HTTPException, Request, Response

from bus.codec import decode_result, result_to_sdk_protobuf, sampled_to_sdk_protobuf
from bus.errors import CodecError
from bus.events import (
    Failed,
    ForwardBackwardDone,
    ModelCreated,
    ModelUnloaded,
    OptimStepDone,
    Sampled,
    WeightsLoaded,
    WeightsSaved,
    parse_request_id,
    parse_sample_request_id,
)
from bus.results import StoredResult
from bus.tables import ModelRow
from runtime.ingress import json_passes, sample_futures
from runtime.ingress.answers import answer, number, protobuf
from runtime.ingress.body import convert, read_json, text_field
from runtime.ingress.deps import Caller, Deps, Injected
from runtime.ingress.off_loop import off_loop
from runtime.ingress.requests import RetrieveFutureRequest

router = APIRouter(prefix="/api/v1")

_SAVED = ("path", "sampling_session_id", "size_bytes")


@router.post("/retrieve_future")
async def retrieve_future(request: Request, tenant: Caller, deps: Injected) -> Response:
    """The result; 408 while it is pending, 410 when it is gone, 400 for an id that this tenant never got."""
    _, fields = await read_json(request)
    request_id = text_field(fields, "request_id")
    try:
        convert(fields, RetrieveFutureRequest)
        if (sample := parse_sample_request_id(request_id)) is not None:
            return await sample_futures.retrieve(deps, tenant, *sample)
        model_id, seq_id = parse_request_id(request_id)
    except (CodecError, ValueError) as error:
        raise HTTPException(400, str(error)) from error
    found = await deps.tables.models.get(model_id)
    if found is None or found[0].tenant != tenant:
        raise _unknown(request_id)
    result = await deps.results.get(tenant, model_id, seq_id)
    if result is None:
        gone = await _gone(deps, found[0], request_id)
        result = await deps.results.wait(tenant, model_id, seq_id, deps.settings.http.long_poll_s)
        if result is None and gone:
            raise HTTPException(410, f"the result of request_id {request_id!r} is no longer kept")
    if result is None:
        return answer({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)
    as_json = json_passes.wanted(request.headers.get("accept", ""))
    return await off_loop(len(result.body), render, result, as_json)


async def _gone(deps: Deps, row: ModelRow, request_id: str) -> bool:
    """Whether the operation has already had its result. 400 where it was never asked for.

    Even then the result may still be on its way, from a dispatcher that was interrupted between the two writes.
    """
    model_id, seq_id = parse_request_id(request_id)
    if await deps.ledger.find(model_id, seq_id) is not None:
        return True
    if await deps.log.holds(model_id, seq_id):
        return False
    if row.status in ("creating", "live"):
        raise _unknown(request_id)
    return True


def render(result: StoredResult, as_json: bool = False) -> Response:
    """A stored result in the form that the SDK reads for its verb; `as_json` where one reads no protobuf."""
    outcome = decode_result(result.body, result.content_type).outcome
    match outcome:
        case ForwardBackwardDone() if as_json:
            return answer(json_passes.result(outcome))
        case ForwardBackwardDone():
            return protobuf(result_to_sdk_protobuf(outcome))
        case OptimStepDone():
            return answer({"metrics": {name: number(value) for name, value in outcome.metrics.items()}})
        case ModelCreated():
            # No type: the SDK reads it as create_model's answer, or as load_weights', whichever it sent.
            return answer({"model_id": outcome.model_id})
        case WeightsSaved():
            told = {field: getattr(outcome, field) for field in _SAVED}
            return answer({field: value for field, value in told.items() if value is not None})
        case WeightsLoaded():
            return answer({"path": outcome.path, "model_id": outcome.model_id, "type": "load_weights"})
        case ModelUnloaded():
            return answer({"model_id": outcome.model_id, "type": "unload_model"})
        case Sampled():
            return protobuf(sampled_to_sdk_protobuf(outcome))
        case Failed():
            return answer({"error": _named(outcome), "category": outcome.category})
        case _:
            assert_never(outcome)


def _named(failed: Failed) -> str:
    """The error, with the field in front where its text does not name it: the SDK shows the text alone."""
    if failed.field and failed.field not in failed.error:
        return f"{failed.field}: {failed.error}"
    return failed.error


def _unknown(request_id: str) -> HTTPException:
    return HTTPException(400, f"request_id {request_id!r} is not known")
