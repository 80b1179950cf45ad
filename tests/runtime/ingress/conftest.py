"""One ingress replica, and plain HTTP clients of two tenants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from bus import scan
from tests.runtime.stand_in import BASE_MODEL, Replica, Service

PROTOBUF = {"content-type": "application/x-protobuf"}


def sdk_body(
    model_id: str, seq_id: int, targets: list[int] | None = None, *, loss: str = "cross_entropy"
) -> bytes:
    """A forward_backward body as the SDK's own code writes it."""
    targets = targets or [1, 2, 3]
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(targets),
        loss_fn_inputs={"target_tokens": targets, "weights": [1.0] * len(targets)},
    )
    data = types.ForwardBackwardInput(data=[datum], loss_fn=loss)  # type: ignore[arg-type]
    request = types.ForwardBackwardRequest(forward_backward_input=data, model_id=model_id, seq_id=seq_id)
    body: bytes = forward_backward_request_to_proto(request).SerializeToString()
    return body


@dataclass
class Wire:
    """A tenant's HTTP client that speaks the protocol by hand."""

    http: httpx.AsyncClient

    async def post(self, path: str, json: Any = None, **options: Any) -> httpx.Response:
        return await self.http.post(f"/api/v1/{path}", json=json, **options)

    async def session(self) -> str:
        response = await self.post(
            "create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
        )
        return str(response.json()["session_id"])

    async def create_model(self, session_id: str, number: int = 0, **changes: Any) -> httpx.Response:
        body = {
            "session_id": session_id,
            "model_seq_id": number,
            "base_model": BASE_MODEL,
            "lora_config": {"rank": 4},
        }
        return await self.post("create_model", {**body, **changes})

    async def model(self) -> str:
        """A live model."""
        future = await self.create_model(await self.session())
        return str((await self.result(future)).json()["model_id"])

    async def forward_backward(self, body: bytes, **headers: str) -> httpx.Response:
        return await self.http.post("/api/v1/forward_backward", content=body, headers={**PROTOBUF, **headers})

    async def optim_step(self, model_id: str, seq_id: int, **changes: Any) -> httpx.Response:
        body = {"model_id": model_id, "seq_id": seq_id, "adam_params": {}, "type": "optim_step"}
        return await self.post("optim_step", {**body, **changes})

    async def poll(self, request_id: str) -> httpx.Response:
        return await self.post("retrieve_future", {"request_id": request_id, "allow_metadata_only": True})

    async def result(self, future: httpx.Response) -> httpx.Response:
        """Poll until it is there."""
        assert future.status_code == 200, future.text
        return await self.settled(future.json()["request_id"])

    async def settled(self, request_id: str) -> httpx.Response:
        async with asyncio.timeout(60):
            while (response := await self.poll(request_id)).status_code == 408:
                pass
        return response

    async def error(self, future: httpx.Response) -> str:
        """The error of a future that failed through the user's fault."""
        response = await self.result(future)
        assert response.status_code == 200
        assert response.json()["category"] == "user"
        return str(response.json()["error"])


@pytest.fixture
async def ingress(service: Service) -> Replica:
    return await service.replica()


@pytest.fixture
async def empty_tables(service: Service) -> None:
    """The broker is shared: nothing of earlier tests is listed."""
    for table in (service.tables.sessions, service.tables.models, service.tables.checkpoints):
        await scan.purge(service.bus, f"KV_{table.name}", f"$KV.{table.name}.>")


@pytest.fixture
async def alice(ingress: Replica) -> AsyncIterator[Wire]:
    async with client(ingress.url, "tml-alice") as http:
        yield Wire(http)


@pytest.fixture
async def bob(ingress: Replica) -> AsyncIterator[Wire]:
    async with client(ingress.url, "tml-bob") as http:
        yield Wire(http)


def client(url: str, key: str | None) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url, headers={"x-api-key": key} if key else {}, timeout=30, trust_env=False
    )
