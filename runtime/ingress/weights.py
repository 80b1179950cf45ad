"""Saving and loading weights. Every one of them is an operation of its model's sequence; loading may be its first."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response

from bus.errors import CodecError
from bus.events import CreateModel
from runtime.ingress import requests
from runtime.ingress.accept import accept_json
from runtime.ingress.body import read_json, text_field
from runtime.ingress.deps import Caller, Injected, owned_model
from runtime.ingress.models import begin_model

router = APIRouter(prefix="/api/v1")


@router.post("/save_weights")
async def save_weights(request: Request, tenant: Caller, deps: Injected) -> Response:
    sent, fields = await read_json(request)
    return await accept_json(deps, tenant, "save_weights", sent, fields, requests.save_weights)


@router.post("/save_weights_external")
async def save_weights_external(request: Request, tenant: Caller, deps: Injected) -> Response:
    sent, fields = await read_json(request)
    read = requests.save_weights_external
    return await accept_json(deps, tenant, "save_weights_external", sent, fields, read)


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(request: Request, tenant: Caller, deps: Injected) -> Response:
    """Without a name, for sampling session `<session_id>:sample:<number>`, numbered within the model's session."""
    sent, fields = await read_json(request)
    model = await owned_model(deps, tenant, text_field(fields, "model_id"))

    def session_of(number: int) -> str:
        if model.session_id is None:
            raise CodecError("sampling_session_seq_id: the model has no session", "sampling_session_seq_id")
        return f"{model.session_id}:sample:{number}"

    read = partial(requests.save_weights_for_sampler, session_of=session_of)
    return await accept_json(deps, tenant, "save_weights_for_sampler", sent, fields, read)


@router.post("/load_weights")
async def load_weights(request: Request, tenant: Caller, deps: Injected) -> Response:
    """Into the model `model_id`; or, without one, a new model of `session_id` that starts from the checkpoint."""
    sent, fields = await read_json(request)
    if fields.get("model_id") is not None:
        return await accept_json(deps, tenant, "load_weights", sent, fields, requests.load_weights)
    try:
        wanted: CreateModel | CodecError = requests.create_from(fields)
    except CodecError as error:
        wanted = error
    return await begin_model(deps, tenant, sent, fields, wanted)
