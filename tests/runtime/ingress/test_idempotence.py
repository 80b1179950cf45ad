"""One number, one body, one result: whatever is sent again, and to whichever replica."""

from __future__ import annotations

import asyncio

from tests.runtime.ingress.conftest import Wire, client, sdk_body
from tests.runtime.stand_in import Replica, Service


async def test_the_same_post_over_two_connections_at_once_runs_once(
    service: Service, alice: Wire, ingress: Replica
) -> None:
    model = await alice.model()
    body = sdk_body(model, 1)
    other = await service.replica()
    async with client(other.url, "tml-alice") as http:
        both = [Wire(http), alice]
        answers = await asyncio.gather(*(both[i % 2].forward_backward(body) for i in range(16)))
    assert [answer.status_code for answer in answers] == [200] * 16
    assert {answer.json()["request_id"] for answer in answers} == {f"{model}#1"}
    await alice.result(answers[0])
    assert [seq for ran, seq, _ in service.dispatcher.ran if ran == model] == [0, 1]


async def test_another_body_under_a_taken_number_is_refused_and_the_first_result_stands(alice: Wire) -> None:
    model = await alice.model()
    first = await alice.forward_backward(sdk_body(model, 1, [8, 16]))
    before = await alice.result(first)
    refused = await alice.forward_backward(sdk_body(model, 1, [8, 17]))
    assert refused.status_code == 400
    assert f"another body was already accepted for seq_id 1 of model_id '{model}'" in refused.json()["detail"]
    assert (await alice.result(first)).content == before.content


async def test_of_two_bodies_at_once_one_wins(alice: Wire) -> None:
    model = await alice.model()
    bodies = [sdk_body(model, 1, [target]) for target in range(8)]
    answers = await asyncio.gather(*map(alice.forward_backward, bodies))
    assert sorted(answer.status_code for answer in answers) == [200] + [400] * 7


async def test_an_optim_step_spelt_otherwise_is_the_same_step(alice: Wire) -> None:
    model = await alice.model()
    first = await alice.optim_step(model, 1, adam_params={"learning_rate": 1e-4, "beta1": 0.9})
    again = await alice.http.post(
        "/api/v1/optim_step",
        content=f'{{"type": "optim_step",  "seq_id": 1, "adam_params": {{"beta1":0.90}}, "model_id": "{model}"}}',
        headers={"content-type": "application/json"},
    )
    assert first.json() == again.json() == {"request_id": f"{model}#1", "model_id": model}
    assert (await alice.optim_step(model, 1, adam_params={"beta1": 0.8})).status_code == 400


async def test_create_model_again_is_the_same_model(alice: Wire, service: Service) -> None:
    session = await alice.session()
    first, again = await asyncio.gather(alice.create_model(session), alice.create_model(session))
    assert first.json() == again.json()
    assert first.json()["model_id"] == f"{session}:train:0"
    assert (await alice.create_model(session, lora_config={"rank": 8})).status_code == 400
    assert (await alice.result(first)).json() == {"model_id": f"{session}:train:0"}
    assert (await alice.create_model(session, 1)).json()["model_id"] == f"{session}:train:1"


async def test_a_refused_request_repeated_is_the_same_failure(alice: Wire) -> None:
    model = await alice.model()
    first, again = [await alice.optim_step(model, 1, foo=1) for _ in range(2)]
    assert first.json() == again.json()
    assert "foo" in await alice.error(first)
    assert (await alice.optim_step(model, 1)).status_code == 400


async def test_a_higher_number_is_accepted_before_a_lower_one_and_runs_after_it(
    alice: Wire, service: Service
) -> None:
    model = await alice.model()
    futures = [await alice.forward_backward(sdk_body(model, seq, [seq])) for seq in (3, 2, 1)]
    for future in futures:
        await alice.result(future)
    assert [seq for ran, seq, _ in service.dispatcher.ran if ran == model] == [0, 1, 2, 3]


async def test_what_one_replica_accepts_another_answers(service: Service, alice: Wire) -> None:
    model = await alice.model()
    future = await alice.forward_backward(sdk_body(model, 1))
    other = await service.replica()
    async with client(other.url, "tml-alice") as http:
        answer = await Wire(http).result(future)
    assert answer.content == (await alice.result(future)).content
