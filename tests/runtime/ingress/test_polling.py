"""retrieve_future: held while pending, repeatable, and definite about what is gone."""

from __future__ import annotations

import asyncio
import time

import httpx
import msgspec
import pytest

from bus import subjects
from bus.codec import JSON, MSGPACK
from bus.events import Failed, OptimStepDone, Result
from tests.runtime.ingress.conftest import Wire, sdk_body
from tests.runtime.stand_in import Replica, Service


async def test_a_pending_poll_is_held_and_then_answered_408(alice: Wire, service: Service) -> None:
    model = await alice.model()
    service.dispatcher.go.clear()
    future = await alice.forward_backward(sdk_body(model, 1))
    began = time.monotonic()
    answer = await alice.poll(future.json()["request_id"])
    assert time.monotonic() - began >= 0.3
    assert answer.status_code == 408
    assert answer.json() == {"type": "try_again", "request_id": f"{model}#1", "queue_state": "active"}


@pytest.mark.parametrize("service", [20.0], indirect=True)
async def test_a_held_poll_is_answered_as_soon_as_the_result_is_there(alice: Wire, service: Service) -> None:
    model = await alice.model()
    service.dispatcher.go.clear()
    future = await alice.optim_step(model, 1)
    poll = asyncio.create_task(alice.poll(future.json()["request_id"]))
    await asyncio.sleep(0.1)
    service.dispatcher.go.set()
    assert (await poll).status_code == 200


async def test_a_result_read_by_a_client_that_hung_up_is_there_for_the_next(alice: Wire) -> None:
    model = await alice.model()
    future = await alice.forward_backward(sdk_body(model, 1))
    await alice.result(future)
    async with httpx.AsyncClient(
        base_url=alice.http.base_url, headers=alice.http.headers, trust_env=False
    ) as other:
        request = other.stream("POST", "/api/v1/retrieve_future", json={"request_id": f"{model}#1"})
        async with request as answer:
            assert answer.status_code == 200  # and its body is never read
    assert (await alice.poll(f"{model}#1")).content == (await alice.poll(f"{model}#1")).content != b""


async def test_a_metric_that_is_not_finite_is_valid_json(alice: Wire) -> None:
    model = await alice.model()
    answer = await alice.result(await alice.optim_step(model, 1, adam_params={"learning_rate": 0.5}))
    assert msgspec.json.decode(answer.content)["metrics"] == {"learning_rate": 0.5, "norm": "Infinity"}


@pytest.mark.parametrize("content_type", [MSGPACK, JSON])
async def test_a_result_is_read_in_whatever_form_it_was_stored(
    alice: Wire, service: Service, content_type: str
) -> None:
    model = await alice.model()
    service.dispatcher.go.clear()
    future = await alice.optim_step(model, 1)
    result = Result(
        request_id=f"{model}#1", model_id=model, seq_id=1, outcome=OptimStepDone(metrics={"a": 1.5})
    )
    await service.results.publish("alice", result, content_type)
    assert (await alice.result(future)).json() == {"metrics": {"a": 1.5}}


async def test_a_failure_names_its_field_even_where_its_text_does_not(alice: Wire, service: Service) -> None:
    model = await alice.model()
    service.dispatcher.go.clear()
    future = await alice.optim_step(model, 1)
    failed = Failed(error="is 1.5, the limit is 1", category="user", field="adam_params.beta1")
    await service.results.publish(
        "alice", Result(request_id=f"{model}#1", model_id=model, seq_id=1, outcome=failed)
    )
    assert (await alice.result(future)).json() == {
        "error": "adam_params.beta1: is 1.5, the limit is 1",
        "category": "user",
    }


async def test_an_expired_result_is_410(alice: Wire, service: Service) -> None:
    model = await alice.model()
    await alice.result(await alice.optim_step(model, 1))
    await service.ledger.record(model, 1, "hash", "done", 2)
    await service.bus.js.purge_stream(subjects.RESULTS_STREAM, subject=subjects.results("alice", model, 1))
    answer = await alice.poll(f"{model}#1")
    assert answer.status_code == 410
    assert f"{model}#1" in answer.json()["detail"]


async def test_a_number_that_was_never_posted_is_refused_at_once(alice: Wire) -> None:
    model = await alice.model()
    answer = await alice.poll(f"{model}#7")
    assert answer.status_code == 400
    assert answer.json()["detail"] == f"request_id '{model}#7' is not known"


@pytest.mark.parametrize("service", [20.0], indirect=True)
async def test_many_polls_for_one_result_are_all_answered(alice: Wire, service: Service) -> None:
    model = await alice.model()
    service.dispatcher.go.clear()
    future = (await alice.optim_step(model, 1)).json()["request_id"]
    polls = [asyncio.create_task(alice.poll(future)) for _ in range(20)]
    await asyncio.sleep(0.1)
    service.dispatcher.go.set()
    assert {answer.status_code for answer in await asyncio.gather(*polls)} == {200}


async def test_an_unloaded_model_answers_through_its_last_future(alice: Wire, ingress: Replica) -> None:
    model = await alice.model()
    future = await alice.post("unload_model", {"model_id": model, "type": "unload_model"})
    assert future.json() == {"request_id": f"{model}#end", "model_id": model}
    assert (await alice.result(future)).json() == {"model_id": model, "type": "unload_model"}
    assert (await alice.post("get_info", {"model_id": model})).status_code == 404
