"""What a client asks before it trains: settings of the SDK, what is served, whether the server is up."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException, Request, Response

from runtime.ingress.answers import RETRY_AFTER_S, answer
from runtime.ingress.body import read_body
from runtime.ingress.deps import Caller, Injected

router = APIRouter(prefix="/api/v1")

MESSAGE_ROOM = 64 * 1024
"""What a chunk leaves of the broker's `max_payload`: the SDK estimates a chunk's bytes, and headers count too."""
DYNAMIC_CONFIG_INTERVAL_S = 300
MAX_TELEMETRY_BYTES = 16 * 1024 * 1024


@router.post("/client/config")
async def client_config(_: Caller, deps: Injected) -> Response:
    """Flags of the SDK. Unknown ones are ignored by it, so one answer serves several versions."""
    client = deps.settings.client
    return answer(
        {
            "pjwt_auth_enabled": False,
            "parallel_fwdbwd_chunks": client.parallel_fwdbwd_chunks,
            "proto_compress_fwdbwd": client.proto_compress_fwdbwd,
            "use_pyqwest_transport": client.use_pyqwest_transport,
            "fwdbwd_max_chunk_len": client.fwdbwd_max_chunk_len,
            "fwdbwd_max_chunk_bytes_count": min(
                client.fwdbwd_max_chunk_bytes_count, deps.bus.max_payload - MESSAGE_ROOM
            ),
        }
    )


@router.post("/client/dynamic_config")
async def dynamic_config(_: Caller) -> Response:
    return answer({"refresh_interval_sec": DYNAMIC_CONFIG_INTERVAL_S, "sample_cancel_enabled": True})


@router.get("/get_server_capabilities")
async def get_server_capabilities(_: Caller, deps: Injected) -> Response:
    """The base models served. 429 until the group has announced its own."""
    found = await deps.tables.groups.get(deps.log.group)
    if found is None:
        raise HTTPException(429, "the model is still being loaded", {"retry-after": str(RETRY_AFTER_S)})
    row = found[0]
    served = {
        "model_name": row.base_model,
        "max_context_length": row.context_length,
        "trainable": True,
        "sampleable": deps.settings.sampler.replicas > 0,
    }
    return answer({"supported_models": [served]})


@router.post("/telemetry")
async def telemetry(request: Request, _: Caller) -> Response:
    """The SDK's own events are of no use here; refusing them would fill its log."""
    await read_body(request, MAX_TELEMETRY_BYTES)
    return answer({"status": "accepted"})


@router.get("/healthz")
async def healthz(deps: Injected) -> Response:
    """Whether requests can be served, for whoever starts and watches the server; needs no key."""
    missing = await deps.ready()
    if missing is not None:
        return answer({"status": "not ready", "detail": missing}, 503)
    return answer({"status": "ready"})
