"""Polling for sampling results: one by one, or all of a client together.

A request lives in one sampler process. While it has no result, a poll looks every few seconds whether that process is
still there: a request that was lost with its process is answered 410, on which the SDK asks anew.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response

from bus import scan, subjects
from bus.codec import decode_result, sampled_to_sdk_protobuf
from bus.errors import CodecError
from bus.events import Failed, Sampled, sample_request_id
from bus.results import StoredResult
from runtime.ingress.answers import answer, protobuf
from runtime.ingress.body import convert, read_json
from runtime.ingress.deps import Caller, Deps, Injected
from runtime.ingress.off_loop import off_loop
from runtime.ingress.requests import RetrieveFuturesRequest
from runtime.ingress.sampling import owned_sampler
from runtime.sampler import asking

router = APIRouter(prefix="/api/v1")

LOOK_EVERY_S = 3.0
"""How often a poll looks for the sampler process."""
NEXT_LOOK_S = 0.05
CLONE = 1_000_000_000
"""Numbers of one client of a sampling session: `clone · 1e9` and up."""


async def retrieve(deps: Deps, tenant: str, session_id: str, seq_id: int) -> Response:
    """The result; 408 while it is pending, 410 when it was lost, has expired or was never asked for."""
    deadline = time.monotonic() + deps.settings.http.long_poll_s
    request_id = sample_request_id(session_id, seq_id)
    while (result := await deps.results.get(tenant, session_id, seq_id)) is None:
        if not await _under_way(deps, tenant, session_id, seq_id):
            result = await deps.results.get(tenant, session_id, seq_id)  # stored since we looked
            if result is None:
                raise HTTPException(410, f"request_id {request_id!r} has no result, and nothing works on it")
            break
        left = deadline - time.monotonic()
        result = await deps.results.wait(tenant, session_id, seq_id, max(0.0, min(left, LOOK_EVERY_S)))
        if result is not None:
            break
        if time.monotonic() >= deadline:
            return answer({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)
    return await off_loop(len(result.body), _render, result)


async def _under_way(deps: Deps, tenant: str, session_id: str, seq_id: int) -> bool:
    found = await deps.tables.samples.get((session_id, str(seq_id)))
    if found is None or found[0].tenant != tenant:
        return False
    return await asking.alive(deps.bus, deps.log.group, found[0].process)


def _render(stored: StoredResult) -> Response:
    outcome = decode_result(stored.body, stored.content_type).outcome
    if isinstance(outcome, Sampled):
        return protobuf(sampled_to_sdk_protobuf(outcome))
    error, category = (
        (outcome.error, outcome.category) if isinstance(outcome, Failed) else (str(outcome), "server")
    )
    return answer({"error": error, "category": category})


@router.post("/retrieve_futures")
async def retrieve_futures(request: Request, tenant: Caller, deps: Injected) -> Response:
    """What has been answered to one client of a sampling session since `prev_cursor`, as soon as there is anything."""
    _, fields = await read_json(request)
    try:
        asked = convert(fields, RetrieveFuturesRequest)
    except CodecError as error:
        raise HTTPException(400, str(error)) from error
    target = asked.target
    await owned_sampler(deps, tenant, target.sampling_session_id)
    hold_s = deps.settings.http.long_poll_s
    if asked.timeout is not None:
        hold_s = min(hold_s, max(0.0, asked.timeout))
    deadline, next_look = time.monotonic() + hold_s, time.monotonic() + LOOK_EVERY_S
    cursor = asked.prev_cursor
    while True:
        completions, cursor = await _stored(
            deps, tenant, target.sampling_session_id, target.cloned_sampler_id, cursor
        )
        if not completions and time.monotonic() >= next_look:
            completions = await _lost(deps, tenant, target.sampling_session_id, target.cloned_sampler_id)
            next_look = time.monotonic() + LOOK_EVERY_S
        if completions or time.monotonic() >= deadline:
            return answer({"completions": completions, "cursor": cursor})
        await asyncio.sleep(NEXT_LOOK_S)


async def _stored(
    deps: Deps, tenant: str, session_id: str, clone: int, cursor: int
) -> tuple[list[dict[str, Any]], int]:
    pattern = subjects.results_of(tenant, session_id)
    completions = []
    for message in await scan.batch(deps.bus, subjects.RESULTS_STREAM, pattern, cursor + 1):
        cursor = message.position
        for seq_id in subjects.numbers([message.subject]):
            if seq_id is not None and seq_id // CLONE == clone:
                completions.append({"state": "finished", "request_id": sample_request_id(session_id, seq_id)})
    return completions, cursor


async def _lost(deps: Deps, tenant: str, session_id: str, clone: int) -> list[dict[str, Any]]:
    """Requests that a sampler process took with it."""
    there: dict[str, bool] = {}
    lost = []
    for key, row in (await deps.tables.samples.all((session_id,))).items():
        seq_id = int(key[1])
        if row.tenant != tenant or seq_id // CLONE != clone:
            continue
        if row.process not in there:
            there[row.process] = await asking.alive(deps.bus, deps.log.group, row.process)
        if not there[row.process]:
            await deps.tables.samples.forget(key)
            lost.append({"state": "failed", "request_id": sample_request_id(session_id, seq_id)})
    return lost
