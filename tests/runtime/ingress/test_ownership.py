"""Every route asks for a key, and shows a tenant nothing of another's."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.runtime.ingress.checkpoints import put
from tests.runtime.ingress.conftest import PROTOBUF, Wire, client, sdk_body
from tests.runtime.stand_in import Replica, Service

POSTS = [
    *("client/config", "client/dynamic_config", "telemetry"),
    *("create_session", "session_heartbeat", "sessions/s/finish"),
    *("create_model", "get_info", "unload_model"),
    *("forward_backward", "optim_step", "retrieve_future"),
    *("forward", "save_weights", "load_weights", "save_weights_for_sampler", "save_weights_external"),
    *("asample", "create_sampling_session", "retrieve_futures", "weights_info"),
    *("copy_weights", "sessions/search", "training_runs/a/checkpoints/weights/b/publish"),
]
GETS = [
    "get_server_capabilities",
    "training_runs",
    "training_runs/a",
    "training_runs/a/checkpoints",
    "training_runs/a/checkpoints/weights/b/archive",
    "training_runs/a/checkpoints/external_weights/b/external_weights_urls",
    "sessions",
    "sessions/a",
    "checkpoints",
    "samplers/a",
]


@pytest.mark.parametrize("key", [None, "tml-nobody", "tml-alice2", "alice"])
async def test_every_route_refuses_a_missing_or_unknown_key(ingress: Replica, key: str | None) -> None:
    async with client(ingress.url, key) as http:
        answers = [await http.post(f"/api/v1/{path}", json={}) for path in POSTS]
        answers += [await http.get(f"/api/v1/{path}") for path in GETS]
    for answer in answers:
        assert answer.status_code == 401, answer.url
        assert "x-api-key" in answer.json()["detail"]


async def test_a_foreign_model_is_answered_like_an_unknown_one(alice: Wire, bob: Wire) -> None:
    model = await alice.model()
    for model_id in (model, "s-none:train:0"):
        answers = [
            await bob.post("get_info", {"model_id": model_id}),
            await bob.post("unload_model", {"model_id": model_id}),
            await bob.optim_step(model_id, 1),
            await bob.forward_backward(sdk_body(model_id, 1)),
            await bob.post("save_weights", {"model_id": model_id, "seq_id": 1, "path": "x"}),
        ]
        for answer in answers:
            assert answer.status_code == 404
            assert answer.json()["detail"] == f"model_id {model_id!r} is not known"


async def test_nothing_of_a_foreign_request_reaches_the_log(alice: Wire, bob: Wire, ingress: Replica) -> None:
    model = await alice.model()
    await bob.optim_step(model, 1)
    assert await ingress.deps.log.get(model, 1) is None


async def test_a_foreign_session_is_answered_like_an_unknown_one(alice: Wire, bob: Wire) -> None:
    session = await alice.session()
    for session_id in (session, "s-none"):
        answers = [
            await bob.post("session_heartbeat", {"session_id": session_id}),
            await bob.post(f"sessions/{session_id}/finish", {"reason": {"type": "success"}}),
            await bob.create_model(session_id),
            await bob.http.get(f"/api/v1/sessions/{session_id}"),
        ]
        assert [answer.status_code for answer in answers] == [404] * 4
    assert (await bob.post("sessions/search", {"session_id": session})).json()["sessions"] == []
    assert (await alice.post("session_heartbeat", {"session_id": session})).status_code == 200


async def test_a_foreign_run_and_checkpoint_is_answered_like_an_unknown_one(
    alice: Wire, bob: Wire, service: Service
) -> None:
    model = await alice.model()
    for kind in ("weights", "external_weights"):
        await put(service, model, f"{kind}/a")
    for run in (model, "s-none:train:0"):
        url = f"/api/v1/training_runs/{run}"
        answers = [
            await bob.http.get(url),
            await bob.http.get(url, params={"access_scope": "accessible"}),
            await bob.http.get(f"{url}/checkpoints"),
            await bob.http.delete(f"{url}/checkpoints/weights/a"),
            await bob.http.post(f"{url}/checkpoints/weights/a/publish"),
            await bob.http.delete(f"{url}/checkpoints/weights/a/publish"),
            await bob.http.put(f"{url}/checkpoints/weights/a/ttl", json={"ttl_seconds": 3600}),
            await bob.http.get(f"{url}/checkpoints/weights/a/archive"),
            await bob.http.get(f"{url}/checkpoints/external_weights/a/external_weights_urls"),
            await bob.post("weights_info", {"tinker_path": f"tinker://{run}/weights/a"}),
            await bob.post(
                "copy_weights",
                {"source_path": f"tinker://{run}/weights/a", "destination_project_id": "bob"},
            ),
        ]
        for answer in answers:
            assert answer.status_code == 404, answer.url
            assert answer.json()["detail"].endswith("is not known")
    listed = await bob.http.get("/api/v1/checkpoints", params={"limit": 1000})
    assert model not in listed.text
    assert (
        await alice.http.delete(f"/api/v1/training_runs/{model}/checkpoints/weights/a")
    ).status_code == 200


async def test_a_copy_goes_into_no_session_of_another(alice: Wire, bob: Wire, service: Service) -> None:
    path = await put(service, await bob.model(), "weights/a", "bob")
    into = {"source_path": str(path), "session_id": await alice.session(), "model_seq_id": 0}
    assert (await bob.post("copy_weights", into)).status_code == 404


async def test_a_foreign_future_is_answered_like_an_unknown_one(alice: Wire, bob: Wire) -> None:
    future = (await alice.create_model(await alice.session())).json()["request_id"]
    foreign, unknown = await bob.poll(future), await bob.poll("s-none:train:0#0")
    assert (foreign.status_code, unknown.status_code) == (400, 400)
    assert foreign.json()["detail"] == f"request_id {future!r} is not known"
    assert unknown.json()["detail"] == "request_id 's-none:train:0#0' is not known"


@pytest.mark.parametrize("request_id", ["", "x", "#1", "a#", "a#01", "a#-1", "a#x", "a#1#"])
async def test_a_malformed_future_is_refused_with_a_reason(alice: Wire, request_id: str) -> None:
    answer = await alice.poll(request_id)
    assert answer.status_code == 400
    assert "request_id" in answer.json()["detail"]


async def test_session_ids_are_distinct(alice: Wire) -> None:
    sessions = await asyncio.gather(*(alice.session() for _ in range(20)))
    assert len(set(sessions)) == 20


async def test_an_unknown_endpoint_is_a_404_that_names_it(alice: Wire) -> None:
    answer = await alice.post("nonsense", {})
    assert answer.status_code == 404
    assert "POST /api/v1/nonsense" in answer.json()["detail"]


async def test_protobuf_goes_to_its_endpoint_alone(alice: Wire) -> None:
    answer: httpx.Response = await alice.http.post(
        "/api/v1/optim_step", content=b"\x0a\x01m", headers=PROTOBUF
    )
    assert answer.status_code == 400
    assert "not JSON" in answer.json()["detail"]
