"""Sampling: sessions over frozen weights, and requests to them.

A session is a row; the weights behind it are named when it is made, and what it samples from is what its row says at
the time of each request. Requests go to the sampler processes directly and never onto the log.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import APIRouter, HTTPException, Request, Response

from bus.errors import CodecError
from bus.events import parse_sample_request_id
from bus.tables import CheckpointRow, SamplerRow
from runtime.checkpoints import paths
from runtime.ingress.answers import answer, full, later
from runtime.ingress.body import convert, number_field, read_json, text_field
from runtime.ingress.deps import Caller, Deps, Injected, owned_session
from runtime.ingress.requests import (
    CancelFutureRequest,
    CreateSamplingSessionRequest,
    JoinSamplingSessionRequest,
)
from runtime.ingress.sample_request import sample_request
from runtime.sampler import asking
from runtime.sampler.asking import NoSampler, Order

router = APIRouter(prefix="/api/v1")

MAX_SEQ_ID = 2**63 - 1
"""The SDK's numbers of sampling requests are int64."""
SAMPLED = ("weights", "sampler_weights")
"""Kinds of checkpoints that can be sampled from."""


@router.post("/create_sampling_session")
async def create_sampling_session(request: Request, tenant: Caller, deps: Injected) -> Response:
    """A session of a number; the same again is the same one. 404 for weights that are not there, or not to be seen."""
    _check_served(deps)
    _, fields = await read_json(request)
    session_id = text_field(fields, "session_id")
    number = number_field(fields, "sampling_session_seq_id", 0)
    session = await owned_session(deps, tenant, session_id)
    if session.status == "finished":
        raise HTTPException(410, f"session {session_id!r} is finished")
    try:
        asked = convert(fields, CreateSamplingSessionRequest)
    except CodecError as error:
        raise HTTPException(400, str(error)) from error
    row = await _weights(deps, tenant, session_id, asked)
    sampler_id = f"{session_id}:sample:{number}"
    if not await deps.tables.samplers.create(sampler_id, row):
        there = await owned_sampler(deps, tenant, sampler_id)
        if there.model_path != row.model_path or there.base_model != row.base_model or there.model_id:
            raise HTTPException(
                400, f"sampling_session_seq_id {number} of session {session_id!r} is already of other weights"
            )
    return answer({"sampling_session_id": sampler_id, "type": "create_sampling_session"})


async def _weights(
    deps: Deps, tenant: str, session_id: str, asked: CreateSamplingSessionRequest
) -> SamplerRow:
    served = deps.settings.served_name
    common: dict[str, Any] = {"tenant": tenant, "session_id": session_id, "created_at": time.time()}
    if asked.model_path is None:
        if asked.base_model is None:
            raise HTTPException(400, "base_model and model_path are both missing: send one")
        if asked.base_model != served:
            raise HTTPException(400, f"base_model {asked.base_model!r} is not served here: use {served!r}")
        return SamplerRow(base_model=served, **common)
    checkpoint = await _checkpoint(deps, tenant, asked.model_path)
    if checkpoint.base_model != served:
        raise HTTPException(
            400,
            f"model_path {asked.model_path!r} is of base model {checkpoint.base_model!r}; this is {served!r}",
        )
    return SamplerRow(
        base_model=served, model_path=asked.model_path, url=checkpoint.url, lora=checkpoint.lora, **common
    )


async def _checkpoint(deps: Deps, tenant: str, path: str) -> CheckpointRow:
    """400 for what is no path of weights to sample from, 404 where nothing is there for this tenant."""
    try:
        parsed = paths.parse(path)
    except ValueError as error:
        raise HTTPException(400, f"model_path: {error}") from error
    if parsed.kind not in SAMPLED:
        raise HTTPException(
            400, f"model_path {path!r} is of kind {parsed.kind}; sampled are {', '.join(SAMPLED)}"
        )
    found = await deps.tables.checkpoints.get(parsed)
    if found is None or not (found[0].public or found[0].tenant == tenant):
        raise HTTPException(404, f"model_path {path!r} is not known")
    row = found[0]
    if row.expires_at is not None and row.expires_at <= time.time():
        raise HTTPException(404, f"model_path {path!r} has expired")
    return row


@router.post("/join_sampling_session")
async def join_sampling_session(request: Request, tenant: Caller, deps: Injected) -> Response:
    """A number of its own for one more client of a session."""
    _, fields = await read_json(request)
    sampler_id = text_field(fields, "sampling_session_id")
    try:
        convert(fields, JoinSamplingSessionRequest)
    except CodecError as error:
        raise HTTPException(400, str(error)) from error
    while True:
        await owned_sampler(deps, tenant, sampler_id)
        found = await deps.tables.samplers.get(sampler_id)
        if found is not None:
            joined = msgspec.structs.replace(found[0], clones=found[0].clones + 1)
            if await deps.tables.samplers.update(sampler_id, joined, found[1]) is not None:
                return answer({"client_counter": joined.clones})


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, tenant: Caller, deps: Injected) -> Response:
    row = await owned_sampler(deps, tenant, sampler_id)
    return answer({"sampler_id": sampler_id, "base_model": row.base_model, "model_path": row.model_path})


@router.post("/asample")
async def asample(request: Request, tenant: Caller, deps: Injected) -> Response:
    """Hand a request to a sampler process. The same number again is the same request, and runs once.

    400 for what cannot be honoured, 404 for an unknown session, 410 for a finished one, 429 while too much waits.
    """
    _check_served(deps)
    _, fields = await read_json(request, deps.settings.http.max_body_bytes)
    sampler_id = text_field(fields, "sampling_session_id")
    number_field(fields, "seq_id", 0, MAX_SEQ_ID)
    sampler = await owned_sampler(deps, tenant, sampler_id)
    if sampler.session_id is not None:
        session = await owned_session(deps, tenant, sampler.session_id)
        if session.status == "finished":
            raise HTTPException(410, f"session {sampler.session_id!r} of this sampler is finished")
    group = await deps.tables.groups.get(deps.log.group)
    if group is None:
        return later("the model is still being loaded")
    try:
        wanted = sample_request(fields, tenant, sampler, group[0])
    except CodecError as error:
        raise HTTPException(400, str(error)) from error
    try:
        taken = await asking.ask(deps.bus, deps.log.group, wanted)
    except NoSampler as error:
        return later(str(error))
    if taken.status == "full":
        return full(taken.detail)
    ids = [f"{wanted.request_id}/{number}" for number in range(wanted.num_samples)]
    return answer({"request_id": wanted.request_id, "model_id": sampler_id, "sample_sequence_ids": ids})


@router.post("/cancel_future")
async def cancel_future(request: Request, tenant: Caller, deps: Injected) -> Response:
    """Stop a sampling request that nobody waits for any more; done already, or of a model, it stays as it is."""
    _, fields = await read_json(request)
    request_id = text_field(fields, "request_id")
    try:
        convert(fields, CancelFutureRequest)
    except CodecError as error:
        raise HTTPException(400, str(error)) from error
    if (parsed := parse_sample_request_id(request_id)) is not None:
        found = await deps.tables.samples.get((parsed[0], str(parsed[1])))
        if found is not None and found[0].tenant == tenant:
            await asking.tell(deps.bus, deps.log.group, found[0].process, Order(cancel=request_id))
    return answer({"request_id": request_id})


async def owned_sampler(deps: Deps, tenant: str, sampler_id: str) -> SamplerRow:
    """The tenant's sampling session. 404 where there is none of that id, 410 where it went with its session."""
    found = await deps.tables.samplers.get(sampler_id) if sampler_id else None
    if found is None:
        session_id = sampler_id.rpartition(":sample:")[0]
        session = await deps.tables.sessions.get(session_id) if session_id else None
        if session is not None and session[0].tenant == tenant and session[0].status == "finished":
            raise HTTPException(410, f"session {session_id!r} of this sampler is finished")
    if found is None or found[0].tenant != tenant:
        raise HTTPException(404, f"sampling_session_id {sampler_id!r} is not known")
    return found[0]


def _check_served(deps: Deps) -> None:
    if not deps.settings.sampler.replicas:
        raise HTTPException(400, "this server only trains: sampler.replicas is 0 in its settings")
