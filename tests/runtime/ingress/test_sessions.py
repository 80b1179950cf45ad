"""Sessions, models and what a client asks before it trains."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from observability.recorder import Recorder
from runtime.config import Client
from runtime.ingress.counting import REQUESTS
from tests.runtime.ingress.conftest import Wire, client
from tests.runtime.stand_in import CONTEXT, MODEL_DIR, Replica, Service


async def test_a_heartbeat_to_a_finished_session_is_410(alice: Wire) -> None:
    session = await alice.session()
    assert (await alice.post("session_heartbeat", {"session_id": session})).status_code == 200
    for _ in range(2):
        answer = await alice.post(
            f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None}
        )
        assert answer.status_code == 200
    ended = await alice.post("session_heartbeat", {"session_id": session})
    assert ended.status_code == 410
    assert session in ended.json()["detail"]


async def test_finishing_a_session_ends_its_models_and_no_other(alice: Wire, service: Service) -> None:
    session = await alice.session()
    futures = [await alice.create_model(session, number) for number in (0, 1)]
    mine = [(await alice.result(future)).json()["model_id"] for future in futures]
    other = await alice.model()
    await alice.optim_step(mine[0], 1)
    await alice.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
    for model in mine:
        await alice.settled(f"{model}#end")
    ran = [(seq, verb) for model, seq, verb in service.dispatcher.ran if model == mine[0]]
    assert ran == [(0, "create_model"), (1, "optim_step"), (None, "unload_model")]
    assert (await alice.post("get_info", {"model_id": other})).status_code == 200


async def test_a_finished_session_creates_no_models(alice: Wire) -> None:
    session = await alice.session()
    await alice.post(f"sessions/{session}/finish", {"reason": {"type": "errored"}})
    assert (await alice.create_model(session)).status_code == 410


async def test_a_session_field_that_cannot_be_honoured_is_refused(alice: Wire) -> None:
    answer = await alice.post("create_session", {"tags": [], "sdk_version": "0.38.0", "project_id": "p"})
    assert answer.status_code == 400
    assert "project_id is not a field" in answer.json()["detail"]


async def test_a_session_keeps_what_the_user_wrote_on_it(alice: Wire, service: Service) -> None:
    answer = await alice.post(
        "create_session", {"tags": ["a"], "user_metadata": {"n": 1}, "display_name": "mine"}
    )
    found = await service.tables.sessions.get(answer.json()["session_id"])
    assert found is not None
    row = found[0]
    assert (row.tags, row.user_metadata, row.display_name, row.tenant) == (
        ("a",),
        {"n": "1"},
        "mine",
        "alice",
    )


async def test_get_info_waits_for_a_model_that_is_being_made(alice: Wire, service: Service) -> None:
    service.dispatcher.go.clear()
    future = await alice.create_model(await alice.session())
    asked = asyncio.create_task(alice.post("get_info", {"model_id": future.json()["model_id"]}))
    await asyncio.sleep(0.1)
    assert not asked.done()
    service.dispatcher.go.set()
    info = (await asked).json()
    assert info["model_data"] == {"arch": "qwen3", "model_name": "tiny", "tokenizer_id": MODEL_DIR}
    assert (info["is_lora"], info["lora_rank"], info["model_name"]) == (True, 4, "tiny")


async def test_chunks_are_as_large_as_the_broker_takes(service: Service) -> None:
    for wanted, answered in [(5_000_000, 5_000_000), (100_000_000, 8 * 1024**2 - 64 * 1024)]:
        settings = msgspec.structs.replace(
            service.settings, client=Client(fwdbwd_max_chunk_bytes_count=wanted)
        )
        replica = await service.replica(settings)
        async with client(replica.url, "tml-alice") as http:
            flags = (await Wire(http).post("client/config", {"sdk_version": "0.38.0"})).json()
        assert flags["fwdbwd_max_chunk_bytes_count"] == answered
        assert flags["pjwt_auth_enabled"] is False


async def test_capabilities_name_the_base_model(alice: Wire) -> None:
    answer = await alice.http.get("/api/v1/get_server_capabilities")
    assert answer.json() == {
        "supported_models": [
            {"model_name": "tiny", "max_context_length": CONTEXT, "trainable": True, "sampleable": True}
        ]
    }


async def test_telemetry_is_accepted_and_forgotten(alice: Wire) -> None:
    answer = await alice.post("telemetry", {"events": [], "session_id": "sessionless-1"})
    assert answer.json() == {"status": "accepted"}


@pytest.mark.parametrize(("status", "code"), [("ready", 200), ("starting", 503), ("rebuilding", 503)])
async def test_healthz_says_whether_the_group_can_work(
    service: Service, ingress: Replica, status: str, code: int
) -> None:
    await service.dispatcher.announce(status)
    async with client(ingress.url, None) as http:
        answer = await http.get("/api/v1/healthz")
    assert answer.status_code == code
    assert status in str(answer.json())


async def test_requests_are_counted_by_route_template(service: Service) -> None:
    recorder = Recorder("ingress")
    replica = await service.replica(recorder=recorder)
    async with client(replica.url, "tml-alice") as http:
        wire = Wire(http)
        for _ in range(2):
            await wire.post(f"sessions/{await wire.session()}/finish", {})
        await wire.post("sessions/none/finish", {})
        await wire.post("what/ever", {})
    counted = {
        (sample.labels["route"], sample.labels["status"]): sample.value
        for sample in recorder.snapshot().samples
        if sample.name == REQUESTS
    }
    assert counted[("/api/v1/sessions/{session_id}/finish", "2xx")] == 2
    assert counted[("/api/v1/sessions/{session_id}/finish", "4xx")] == 1
    assert counted[("/api/v1/create_session", "2xx")] == 2
    assert counted[("unrouted", "4xx")] == 1
