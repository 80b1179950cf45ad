"""Saving and loading weights on the wire: what is asked of the dispatcher, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from bus.events import (
    Checkpoint,
    CreateModel,
    LoadWeights,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
)
from tests.runtime.ingress.conftest import Wire
from tests.runtime.stand_in import Service

PATH = "tinker://run:train:0/weights/x"


async def test_what_is_asked_reaches_the_dispatcher(alice: Wire, service: Service) -> None:
    session = await alice.session()
    model = (await alice.result(await alice.create_model(session))).json()["model_id"]
    sent: list[tuple[str, dict[str, Any], object]] = [
        (
            "save_weights",
            {"path": "a", "ttl_seconds": 3600, "overwrite": True, "user_metadata": {"k": "v"}},
            SaveWeights(name="a", ttl_seconds=3600, overwrite=True, user_metadata={"k": "v"}),
        ),
        ("save_weights", {}, SaveWeights(name="2")),
        ("save_weights_for_sampler", {"path": "a", "kind": "snapshot"}, SaveWeightsForSampler(name="a")),
        (
            "save_weights_for_sampler",
            {"sampling_session_seq_id": 7, "kind": "inflight"},
            SaveWeightsForSampler(sampling_session_id=f"{session}:sample:7", inflight=True),
        ),
        (
            "save_weights_external",
            {"path": "a", "ttl_seconds": 60},
            SaveWeightsExternal(name="a", ttl_seconds=60),
        ),
        (
            "load_weights",
            {"path": PATH, "optimizer": True},
            LoadWeights(checkpoint=Checkpoint(path=PATH, optimizer=True)),
        ),
    ]
    for number, (endpoint, fields, wanted) in enumerate(sent, start=1):
        body = {"model_id": model, "seq_id": number, "type": endpoint, **fields}
        assert "error" not in (await alice.result(await alice.post(endpoint, body))).json()
        assert service.dispatcher.asked[model, number] == wanted


async def test_a_session_that_samples_is_named_in_the_answer(alice: Wire) -> None:
    session = await alice.session()
    model = (await alice.result(await alice.create_model(session))).json()["model_id"]
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
    answer = await alice.result(await alice.post("save_weights_for_sampler", body))
    assert answer.json() == {"sampling_session_id": f"{session}:sample:0"}


async def test_a_model_out_of_a_checkpoint_has_the_id_that_the_sdk_works_out(
    alice: Wire, service: Service
) -> None:
    session = await alice.session()
    body = {
        "session_id": session,
        "model_seq_id": 3,
        "path": PATH,
        "optimizer": True,
        "user_metadata": {"n": 1},
    }
    model = f"{session}:train:3"
    future = await alice.post("load_weights", body)
    assert future.json()["model_id"] == model
    assert (await alice.result(future)).json() == {"model_id": model}
    wanted = CreateModel(base_model="", user_metadata={"n": "1"}, start=Checkpoint(path=PATH, optimizer=True))
    assert service.dispatcher.asked[model, 0] == wanted
    assert (await alice.post("load_weights", body)).json() == future.json()


@pytest.mark.parametrize(
    ("endpoint", "fields", "says"),
    [
        ("save_weights", {"path": "a/b"}, "path: name 'a/b' holds a slash"),
        ("save_weights", {"path": ".."}, "path: name '..' names nothing"),
        ("save_weights", {"path": "a", "public": True}, "public is not a field"),
        ("save_weights_for_sampler", {}, "give one of them"),
        ("save_weights_for_sampler", {"path": "a", "sampling_session_seq_id": 1}, "give one of them"),
        ("save_weights_for_sampler", {"path": "a", "kind": "inflight"}, "kind is"),
        ("save_weights_external", {"path": "a", "age_encryption_recipients": ["age1x"]}, "encrypted files"),
        ("save_weights_external", {}, "path is missing"),
        ("load_weights", {"path": "tinker://run/nothing/x", "optimizer": False}, "is not a checkpoint's"),
        ("load_weights", {"path": PATH}, "optimizer is missing"),
        (
            "load_weights",
            {"path": PATH, "optimizer": True, "weights_access_token": "t"},
            "weights_access_token",
        ),
        ("load_weights", {"path": PATH, "optimizer": True, "base_model": "tiny"}, "base_model is not for"),
    ],
)
async def test_what_cannot_be_honoured_uses_up_its_number_and_says_so(
    alice: Wire, endpoint: str, fields: dict[str, Any], says: str
) -> None:
    model = await alice.model()
    refused = await alice.post(endpoint, {"model_id": model, "seq_id": 1, "type": endpoint, **fields})
    after = await alice.optim_step(model, 2)
    assert says in await alice.error(refused)
    assert "metrics" in (await alice.result(after)).json()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"weights_access_token": "t"}, "weights_access_token"),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "dimuon"),
        ({"path": "tinker://run/weights/../x"}, "is not a checkpoint's"),
    ],
)
async def test_a_model_out_of_what_cannot_be_honoured_fails_through_its_future(
    alice: Wire, fields: dict[str, Any], says: str
) -> None:
    body = {"session_id": await alice.session(), "model_seq_id": 0, "path": PATH, "optimizer": True}
    assert says in await alice.error(await alice.post("load_weights", {**body, **fields}))
