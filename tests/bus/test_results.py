from __future__ import annotations

import asyncio
import random
import time

import pytest

from bus import results as results_module
from bus.codec import JSON, encode
from bus.connection import Bus
from bus.embedded import EmbeddedBroker
from bus.events import OptimStepDone, Result, request_id
from bus.results import Published, Results, StoredResult
from tests.bus.proxy import Proxy


def result(seq_id: int, *, model_id: str = "m", norm: float = 1.0) -> Result:
    outcome = OptimStepDone(metrics={"grad_norm:max": norm})
    return Result(request_id=request_id(model_id, seq_id), model_id=model_id, seq_id=seq_id, outcome=outcome)


@pytest.fixture
def results(bus: Bus) -> Results:
    return Results(bus)


async def test_a_result_is_stored_once_and_stays(results: Results) -> None:
    assert await results.get("demo", "m", 1) is None
    assert await results.publish("demo", result(1)) is Published.NEW
    assert await results.publish("demo", result(1)) is Published.SAME
    assert await results.publish("demo", result(1, norm=2.0)) is Published.DIFFERENT
    for _ in range(2):
        found = await results.get("demo", "m", 1)
        assert found is not None
        assert found.result() == result(1)


async def test_a_result_may_be_json(results: Results) -> None:
    await results.publish("demo", result(1), JSON)
    assert await results.get("demo", "m", 1) == StoredResult(encode(result(1), JSON), JSON)


async def test_of_two_writers_exactly_one_is_new(results: Results, second_bus: Bus) -> None:
    other = Results(second_bus)
    for seq_id in range(20):
        answers = await asyncio.gather(
            results.publish("demo", result(seq_id)), other.publish("demo", result(seq_id, norm=2.0))
        )
        assert set(answers) == {Published.NEW, Published.DIFFERENT}


@pytest.fixture
def never_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a wake-up can end a wait in time."""
    monkeypatch.setattr(results_module, "_POLL_S", 100.0)


@pytest.mark.usefixtures("never_polls")
async def test_a_wait_ends_with_the_result_or_with_its_time(results: Results) -> None:
    began = time.monotonic()
    assert await results.wait("demo", "m", 1, 0.2) is None
    assert 0.2 <= time.monotonic() - began < 20
    waiting = asyncio.create_task(results.wait("demo", "m", 1, 60))
    await asyncio.sleep(0.05)
    await results.publish("demo", result(1))
    async with asyncio.timeout(30):
        found = await waiting
    assert found is not None
    assert found.result() == result(1)
    assert await results.wait("demo", "m", 1, 0.5) == found


@pytest.mark.usefixtures("never_polls")
async def test_no_result_falls_between_looking_and_listening(second_bus: Bus, results: Results) -> None:
    """Published at a random moment around the start of the wait; a missed one would never be found."""
    publisher = Results(second_bus)
    moments = random.Random(0)

    async def publish_soon(seq_id: int) -> None:
        await asyncio.sleep(moments.random() * 0.004)
        await publisher.publish("demo", result(seq_id))

    async with asyncio.timeout(60):
        for seq_id in range(100):
            publishing = asyncio.create_task(publish_soon(seq_id))
            await asyncio.sleep(moments.random() * 0.004)
            assert await results.wait("demo", "m", seq_id, 50) is not None
            await publishing


async def test_five_hundred_waits_share_one_subscription(bus: Bus, results: Results) -> None:
    before = len(bus.nc._subs)
    waits = [asyncio.create_task(results.wait("demo", "m", seq_id, 20)) for seq_id in range(500)]
    await asyncio.sleep(0.3)
    assert len(bus.nc._subs) <= before + 2  # the results', and the one all requests share
    for seq_id in range(500):
        await results.publish("demo", result(seq_id))
    found = await asyncio.gather(*waits)
    assert [f.result().seq_id for f in found if f is not None] == list(range(500))
    assert results._waiting == {}


async def test_a_cancelled_wait_leaves_nothing_behind_and_the_result_readable(results: Results) -> None:
    for pause_s in (0, 0.001, 0.05):
        waiting = asyncio.create_task(results.wait("demo", "m", 1, 5))
        await asyncio.sleep(pause_s)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert results._waiting == {}
    await results.publish("demo", result(1))
    assert await results.wait("demo", "m", 1, 1) is not None


@pytest.mark.usefixtures("never_polls")
async def test_a_wait_outlives_a_restart_of_the_broker(broker: EmbeddedBroker, results: Results) -> None:
    waiting = asyncio.create_task(results.wait("demo", "m", 1, 60))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(broker.restart, kill=True)
    await results.publish("demo", result(1))
    async with asyncio.timeout(50):
        assert await waiting is not None


@pytest.mark.usefixtures("never_polls")
async def test_a_wait_whose_wake_up_was_lost_looks_again_after_reconnecting(
    results: Results, frail_bus: Bus, proxy: Proxy
) -> None:
    waiting = asyncio.create_task(Results(frail_bus).wait("demo", "m", 1, 60))
    await asyncio.sleep(0.1)
    proxy.muted = True
    await results.publish("demo", result(1))
    await asyncio.sleep(0.1)
    proxy.muted = False
    proxy.cut()
    async with asyncio.timeout(50):
        assert await waiting is not None


@pytest.mark.usefixtures("never_polls")
async def test_a_tenant_waits_for_its_own_results(results: Results, demo_bus: Bus) -> None:
    own = Results(demo_bus, "demo")
    waiting = asyncio.create_task(own.wait("demo", "m:1", 3, 60))
    await asyncio.sleep(0.05)
    await results.publish("demo", result(3, model_id="m:1"))
    async with asyncio.timeout(30):
        found = await waiting
    assert found is not None
    assert found.result() == result(3, model_id="m:1")
    await own.close()


async def test_a_replayed_result_does_not_reach_live_subscribers_again(
    results: Results, demo_bus: Bus
) -> None:
    live = await demo_bus.nc.subscribe("tinker.v1.results.demo.>")
    await demo_bus.nc.flush()
    await results.publish("demo", result(1))
    await results.publish("demo", result(1))
    await results.publish("demo", result(1, norm=2.0))
    await results.publish("demo", result(2))
    assert (await live.next_msg(2)).subject == "tinker.v1.results.demo.m.1"
    assert (await live.next_msg(2)).subject == "tinker.v1.results.demo.m.2"


async def test_a_models_results_are_read_in_order_and_as_they_come(results: Results) -> None:
    for seq_id in (2, 1):
        await results.publish("demo", result(seq_id))
        await results.publish("other", result(seq_id))
    assert await results.numbers("demo", "m") == {1, 2}
    assert await results.last_position() == 4
    reader = results.read("demo", "m", 2)
    assert (await anext(reader))[0] == 1
    await results.publish("demo", result(3, model_id="another"))
    await results.publish("demo", result(3))
    seq_id, stored = await anext(reader)
    assert (seq_id, stored.result()) == (3, result(3))
    await reader.aclose()
