"""The list of what is served: held to the page made of it, the routes, the SDK's types and the server's answers."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tinker.types
from fastapi.routing import APIRoute

from bus import wire
from bus.tables import SamplerRow
from runtime.ingress import compatibility, requests
from runtime.ingress.app import AREAS
from runtime.ingress.compatibility import ENDPOINTS, NO_EFFECT, NOT_YET, REFUSED, SERVED, Endpoint
from tests.runtime.ingress.checkpoints import put
from tests.runtime.ingress.conftest import PROTOBUF, Wire
from tests.runtime.stand_in import Service

PAGE = Path(__file__).parents[3] / "docs" / "compatibility.md"

SDK_TYPES = {
    "POST client/config": "ClientConfigRequest",
    "POST telemetry": "TelemetrySendRequest",
    "POST create_session": "CreateSessionRequest",
    "POST session_heartbeat": "SessionHeartbeatRequest",
    "POST create_model": "CreateModelRequest",
    "POST get_info": "GetInfoRequest",
    "POST unload_model": "UnloadModelRequest",
    "POST save_weights": "SaveWeightsRequest",
    "POST load_weights": "LoadWeightsRequest",
    "POST save_weights_for_sampler": "SaveWeightsForSamplerRequest",
    "POST save_weights_external": "SaveWeightsExternalRequest",
    "POST create_sampling_session": "CreateSamplingSessionRequest",
    "POST join_sampling_session": "JoinSamplingSessionRequest",
    "POST asample": "SampleRequest",
    "POST retrieve_future": "FutureRetrieveRequest",
    "POST retrieve_futures": "FuturesRetrieveRequest",
    "POST create_custom_loss": "CreateCustomLossRequest",
    "POST copy_weights": "CopyWeightsRequest",
    "POST sessions/search": "SessionSearchRequest",
}

TAKES_ANYTHING = ("client/config", "client/dynamic_config", "telemetry")


def named(endpoint: Endpoint) -> str:
    return endpoint.name


def test_the_page_is_what_the_list_says() -> None:
    assert PAGE.read_text() == compatibility.text(), "run python -m runtime.ingress.compatibility"
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    for row in rows:
        assert len(cells := row.strip("|").split("|")) == 3
        assert all(cell.strip() for cell in cells)


def test_every_route_is_listed_and_everything_listed_is_routed_or_refused() -> None:
    routed = {
        f"{method} {route.path.removeprefix('/api/v1/')}"
        for area in AREAS
        for route in area.router.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    listed = {endpoint.name for endpoint in ENDPOINTS}
    absent = {endpoint.name for endpoint in ENDPOINTS if "not an endpoint" in endpoint.verdict}
    assert len(listed) == len(ENDPOINTS)
    # A refused path is refused under other methods, too.
    extra = {name for name in routed - listed if name.endswith("sessions/{session_id}/project")}
    assert routed - extra == listed - absent
    assert listed >= NOT_YET


def test_every_field_has_a_verdict() -> None:
    for endpoint in ENDPOINTS:
        for name in endpoint.fields:
            assert endpoint.says(name).startswith((SERVED, NO_EFFECT, REFUSED)), (endpoint.name, name)


@pytest.mark.parametrize("name", SDK_TYPES)
def test_every_field_that_the_sdk_can_send_is_listed(name: str) -> None:
    (endpoint,) = (one for one in ENDPOINTS if one.name == name)
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.iter_modules(tinker.types.__path__, "tinker.types.")
        if not found.ispkg
    ]
    of_sdk: Any = next(
        getattr(module, SDK_TYPES[name]) for module in modules if hasattr(module, SDK_TYPES[name])
    )
    assert set(of_sdk.model_fields) <= set(endpoint.fields)


def path_of(endpoint: Endpoint, session: str, model: str) -> str:
    at = (
        endpoint.path.replace("{session_id}", session).replace("{run_id}", model).replace("{sampler_id}", "s")
    )
    return at.replace("{checkpoint_id:path}", "weights/a")


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=named)
async def test_the_server_answers_as_listed(endpoint: Endpoint, alice: Wire) -> None:
    """Refused endpoints say so in a 400, or in the future of the number they use up; others do not."""
    session = await alice.session()
    model = f"{session}:train:0"
    if endpoint.name in NOT_YET:
        await alice.result(await alice.create_model(session))
    answer = await alice.http.request(
        endpoint.method,
        f"/api/v1/{path_of(endpoint, session, model)}",
        json={"model_id": model, "seq_id": 1, "path": "a"} if endpoint.method in ("POST", "PUT") else None,
    )
    said = (
        await alice.error(answer) if answer.status_code == 200 and endpoint.name in NOT_YET else answer.text
    )
    if "not an endpoint" in endpoint.verdict:
        assert answer.status_code == 404
        assert "is not an endpoint of this server" in said
    elif endpoint.verdict.startswith(REFUSED):
        assert answer.status_code in (200, 400)
        assert "is not served by this release" in said
    else:
        assert "is not served" not in said
        assert "is not an endpoint" not in said


READ = [
    one
    for one in ENDPOINTS
    if one.method in ("POST", "PUT")
    and one.fields
    and one.verdict.startswith(SERVED)
    and one.path not in TAKES_ANYTHING
]


@pytest.mark.parametrize("endpoint", READ, ids=named)
async def test_a_field_that_is_not_listed_is_refused_by_name(
    endpoint: Endpoint, alice: Wire, service: Service
) -> None:
    """Sent with what identifies the request alone: everything else may be missing, but not this unknown."""
    session = await alice.session()
    model = (await alice.result(await alice.create_model(session))).json()["model_id"]
    path = await put(service, model, "weights/a")
    known: dict[str, Any] = {
        "model_id": model,
        "session_id": session,
        "model_seq_id": 7,
        "seq_id": 1,
        "base_model": "tiny",
        "lora_config": {"rank": 4},
        "adam_params": {},
        "request_id": f"{model}#0",
        "tinker_path": str(path),
        "source_path": str(path),
        "destination_project_id": "alice",
        "ttl_seconds": 3600,
        "sampling_session_seq_id": 0,
        "sampling_session_id": f"{session}:sample:7",
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "sampling_params": {"max_tokens": 1},
        "target": {"type": "sampling_session", "sampling_session_id": f"{session}:sample:7"},
        "path": "a",
        "optimizer": False,
    }
    row = SamplerRow(tenant="alice", base_model="tiny", created_at=0.0, session_id=session)
    await service.tables.samplers.put(f"{session}:sample:7", row)
    if endpoint.path == "copy_weights":
        del known["session_id"], known["model_seq_id"]
    body = {
        name: value
        for name, value in known.items()
        if name in endpoint.fields and not endpoint.fields[name].startswith(REFUSED)
    }
    if "forward_backward_input" in endpoint.fields or "forward_input" in endpoint.fields:
        batch = {"data": [], "loss_fn": "cross_entropy"}
        field = "forward_input" if endpoint.path == "forward" else "forward_backward_input"
        body = {"model_id": model, "seq_id": 1, field: batch}
    url = f"/api/v1/{path_of(endpoint, session, model)}"
    answer = await alice.http.request(endpoint.method, url, json={**body, "colour": "red"})
    said = await alice.error(answer) if answer.status_code == 200 else answer.text
    assert "colour is not a field that this server knows" in said


@pytest.mark.parametrize(
    ("verb", "fields", "says"),
    [
        ("create_session", {"project_id": "p"}, "project_id 'p'"),
        ("sessions/search", {"project_ids": ["p"]}, "project_ids 'p'"),
        ("create_model", {"optimizer_config": {"type": "dimuon", "version": 1}}, "optimizer_config.type"),
        (
            "optim_step",
            {"optimizer_params": {"type": "dimuon", "learning_rate": 1.0}},
            "optimizer_params.type",
        ),
        ("copy_weights", {"destination_project_id": "p"}, "destination_project_id 'p'"),
        ("copy_weights", {"weights_access_token": "t"}, "weights_access_token"),
        ("load_weights", {"weights_access_token": "t"}, "weights_access_token"),
        ("load_weights", {"optimizer_config": {"type": "dimuon", "version": 1}}, "optimizer_config"),
        ("save_weights_external", {"age_encryption_recipients": ["a"]}, "age_encryption_recipients"),
        ("asample", {"record_stability_info": True}, "record_stability_info"),
        ("asample", {"base_model": "tiny"}, "base_model"),
        ("asample", {"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, "'image'"),
    ],
)
async def test_a_value_that_is_listed_as_refused_is_refused_by_name(
    verb: str, fields: dict[str, Any], says: str, alice: Wire, service: Service
) -> None:
    session = await alice.session()
    model = (await alice.result(await alice.create_model(session))).json()["model_id"]
    path = await put(service, model, "weights/a")
    known: dict[str, dict[str, Any]] = {
        "create_session": {},
        "sessions/search": {},
        "create_model": {
            "session_id": session,
            "model_seq_id": 1,
            "base_model": "tiny",
            "lora_config": {"rank": 4},
        },
        "optim_step": {"model_id": model, "seq_id": 1},
        "copy_weights": {"source_path": str(path)},
        "load_weights": {"model_id": model, "seq_id": 1, "path": str(path), "optimizer": False},
        "save_weights_external": {"model_id": model, "seq_id": 1, "path": "a"},
        "asample": {
            "sampling_session_id": f"{session}:sample:7",
            "seq_id": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
            "sampling_params": {"max_tokens": 1},
        },
    }
    row = SamplerRow(tenant="alice", base_model="tiny", created_at=0.0, session_id=session)
    await service.tables.samplers.put(f"{session}:sample:7", row)
    answer = await alice.post(verb, {**known[verb], **fields})
    said = await alice.error(answer) if answer.status_code == 200 else answer.text
    assert says in said


async def test_an_image_is_refused_by_name(alice: Wire) -> None:
    model = await alice.model()
    request = wire.ForwardBackwardRequest(model_id=model, seq_id=1, loss_fn="cross_entropy")
    request.data.add().model_input.add().image.data = b"x"
    answer = await alice.http.post(
        "/api/v1/forward_backward", content=request.SerializeToString(), headers=PROTOBUF
    )
    assert "is an image" in await alice.error(answer)


def test_requests_are_structs_that_refuse_what_they_do_not_know() -> None:
    structs = [
        one for one in vars(requests).values() if isinstance(one, type) and issubclass(one, msgspec.Struct)
    ]
    for one in structs:
        if one.__name__.endswith("Request"):
            assert one.__struct_config__.forbid_unknown_fields, one
