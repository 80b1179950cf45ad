"""Too much that waits for its result: 429, nothing stored, and room again later."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from runtime.config import Limits
from tests.runtime.ingress.conftest import Wire, client, sdk_body
from tests.runtime.stand_in import Service


@contextlib.asynccontextmanager
async def wire(service: Service, limits: Limits) -> AsyncIterator[Wire]:
    """A client of a replica of its own that keeps these limits."""
    replica = await service.replica(msgspec.structs.replace(service.settings, limits=limits))
    async with client(replica.url, "tml-alice") as http:
        yield Wire(http)


def says_later(answer: httpx.Response, limit: str) -> None:
    assert answer.status_code == 429, answer.text
    assert 0 < float(answer.headers["retry-after"]) <= 60
    assert answer.json()["queue_state"] == "paused_capacity"
    assert limit in answer.json()["detail"]
    assert answer.json()["queue_state_reason"] == answer.json()["detail"]


async def accepted(answer: httpx.Response, again: object) -> httpx.Response:
    """The answer of the same request once it is accepted."""
    assert callable(again)
    async with asyncio.timeout(20):
        while answer.status_code == 429:
            await asyncio.sleep(0.1)
            answer = await again()
    assert answer.status_code == 200, answer.text
    return answer


async def test_past_a_models_limit_a_request_is_429_and_is_accepted_later(service: Service) -> None:
    async with wire(service, Limits(max_model_ops=3)) as alice:
        model, other = await alice.model(), await alice.model()
        await service.quiet()
        service.dispatcher.go.clear()
        taken = [await alice.optim_step(model, seq) for seq in (1, 2, 3)]
        assert {answer.status_code for answer in taken} == {200}
        refused = await alice.optim_step(model, 4)
        says_later(refused, f"model_id {model!r} has 3 operations without a result; the limit is 3")
        assert await service.log.get(model, 4) is None
        assert (await alice.optim_step(other, 1)).status_code == 200
        service.dispatcher.go.set()
        late = await accepted(refused, lambda: alice.optim_step(model, 4))
        for answer in (*taken, late):
            assert "metrics" in (await alice.result(answer)).json()
    assert [seq for name, seq, _ in service.dispatcher.ran if name == model] == [0, 1, 2, 3, 4]


async def test_bytes_count_too(service: Service) -> None:
    body = sdk_body("x" * 40, 1, [1] * 1000)
    async with wire(service, Limits(max_model_bytes=2 * len(body))) as alice:
        model = await alice.model()
        await service.quiet()
        service.dispatcher.go.clear()
        first, second, third = [
            await alice.forward_backward(sdk_body(model, seq, [1] * 1000)) for seq in (1, 2, 3)
        ]
        assert (first.status_code, second.status_code) == (200, 200)
        says_later(third, f"the limit is {2 * len(body)} (limits.max_model_bytes)")


async def test_what_two_replicas_accept_counts_together(service: Service) -> None:
    limits = Limits(max_model_ops=0, max_group_ops=4)
    async with wire(service, limits) as one, wire(service, limits) as two:
        first, second = await one.model(), await two.model()
        await service.quiet()
        service.dispatcher.go.clear()
        for seq in (1, 2):
            assert (await one.optim_step(first, seq)).status_code == 200
            assert (await two.optim_step(second, seq)).status_code == 200
        await asyncio.sleep(0.1)
        says_later(await one.optim_step(first, 3), "limits.max_group_ops")
        says_later(await two.optim_step(second, 3), "limits.max_group_ops")


async def test_the_number_whose_turn_it_is_gets_in_however_much_waits(service: Service) -> None:
    async with wire(service, Limits(max_model_ops=2)) as alice:
        model = await alice.model()
        await service.quiet()
        early = [await alice.optim_step(model, seq) for seq in (3, 2)]
        assert {answer.status_code for answer in early} == {200}
        says_later(await alice.optim_step(model, 4), "limits.max_model_ops")
        first = await alice.optim_step(model, 1)
        assert first.status_code == 200
        for answer in (first, *early):
            await alice.result(answer)


async def test_what_was_accepted_already_is_answered_however_much_waits(service: Service) -> None:
    async with wire(service, Limits(max_model_ops=2)) as alice:
        model = await alice.model()
        await service.quiet()
        service.dispatcher.go.clear()
        answers = [await alice.optim_step(model, seq) for seq in (1, 2, 2)]
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert answers[1].json() == answers[2].json()
        says_later(await alice.optim_step(model, 3), "limits.max_model_ops")


async def test_a_model_can_be_made_and_ended_however_much_waits(service: Service) -> None:
    async with wire(service, Limits(max_group_ops=1)) as alice:
        model = await alice.model()
        await service.quiet()
        service.dispatcher.go.clear()
        assert (await alice.optim_step(model, 1)).status_code == 200
        assert (await alice.create_model(await alice.session())).status_code == 200
        assert (await alice.post("unload_model", {"model_id": model})).status_code == 200


async def test_requests_that_come_at_once_do_not_pass_the_limit_together(service: Service) -> None:
    async with wire(service, Limits(max_model_ops=5)) as alice:
        model = await alice.model()
        await service.quiet()
        service.dispatcher.go.clear()
        answers = await asyncio.gather(*(alice.optim_step(model, seq) for seq in range(2, 30)))
        codes = [answer.status_code for answer in answers]
        assert codes.count(200) == 5
        assert codes.count(429) == 23


@pytest.mark.parametrize("limits", [Limits(max_model_ops=0, max_model_bytes=0, max_group_ops=0)])
async def test_zero_is_no_limit(service: Service, limits: Limits) -> None:
    async with wire(service, limits) as alice:
        model = await alice.model()
        await service.quiet()
        service.dispatcher.go.clear()
        for seq in range(1, 30):
            assert (await alice.optim_step(model, seq)).status_code == 200
