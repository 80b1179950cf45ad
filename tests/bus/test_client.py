"""The client library as its users have it: a tenant's credentials, and a server on the other side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bus import results
from bus.client import Client, LoraConfig, OperationFailed, QueueFull, Unconfirmed, connect, datum
from bus.connection import BrokerUnreachable, Bus, WrongCredentials
from bus.embedded import EmbeddedBroker
from bus.events import (
    AdamParams,
    CreateModel,
    Failed,
    ForwardBackward,
    ForwardBackwardDone,
    ModelCreated,
    ModelUnloaded,
    OptimStep,
    OptimStepDone,
    Result,
    Submission,
    request_id,
)
from bus.results import Results
from bus.streams import ensure_streams
from bus.submit import SubmitReader
from tests.bus.proxy import Proxy
from tests.bus.waiting import until


class Server:
    """Answers submissions in the order in which they come: the loss is the number of datums."""

    def __init__(self, bus: Bus) -> None:
        self._results = Results(bus)
        self._reader = SubmitReader(bus)
        self.seen: list[Submission] = []

    async def run(self) -> None:
        async for submitted in self._reader.read():
            submission = submitted.submission
            assert isinstance(submission, Submission)
            self.seen.append(submission)
            result = Result(
                request_id=request_id(submitted.model_id, submission.seq_id),
                model_id=submitted.model_id,
                seq_id=submission.seq_id,
                outcome=self._outcome(submitted.model_id, submission.op),
            )
            await self._results.publish(submitted.tenant, result)
            await submitted.ack()

    @staticmethod
    def _outcome(model_id: str, op: Any) -> Any:
        match op:
            case CreateModel(base_model="missing"):
                return Failed(error="there is no base model 'missing'", category="user", field="base_model")
            case CreateModel():
                return ModelCreated(model_id=model_id, base_model=op.base_model, lora=op.lora)
            case ForwardBackward():
                outputs = tuple({"logprobs": d.model_input} for d in op.data)
                return ForwardBackwardDone(loss_fn_outputs=outputs, metrics={"loss:sum": float(len(op.data))})
            case OptimStep():
                return OptimStepDone(metrics={"lr:max": op.adam_params.learning_rate})
            case _:
                return ModelUnloaded(model_id=model_id)


@pytest.fixture
async def server(bus: Bus) -> AsyncIterator[Server]:
    server = Server(bus)
    running = asyncio.create_task(server.run())
    yield server
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
async def client(broker: EmbeddedBroker, bus: Bus) -> AsyncIterator[Client]:
    async with await connect(broker.url, tenant="demo", password="demo-password") as client:
        yield client


DATA = [datum([1, 2], target_tokens=[2, 3], weights=[1, 1])]


async def test_the_documented_loop_runs(broker: EmbeddedBroker, server: Server) -> None:
    async with await connect(broker.url, tenant="demo", password="demo-password") as client:
        model = await client.create_model("my-model", base_model="tiny", lora=LoraConfig(rank=8))
        pending = await model.forward_backward(DATA, loss="cross_entropy", config={"beta": 0.5})
        step = await model.optim_step(learning_rate=1e-3)
        done = await pending
        assert done.metrics == {"loss:sum": 1.0}
        assert done.loss_fn_outputs[0]["logprobs"] == DATA[0].model_input
        assert (await step).metrics == {"lr:max": 1e-3}
        assert await pending == done
        assert await model.unload() == ModelUnloaded(model_id="my-model")
    assert [s.seq_id for s in server.seen] == [0, 1, 2, None]
    sent = server.seen[1].op
    assert isinstance(sent, ForwardBackward)
    assert (sent.loss.name, sent.loss.config, sent.forward_only) == ("cross_entropy", {"beta": 0.5}, False)
    assert server.seen[2].op == OptimStep(adam_params=AdamParams(learning_rate=1e-3))


async def test_many_operations_are_sent_ahead_in_the_order_of_the_calls(
    client: Client, server: Server
) -> None:
    model = client.attach("m", next_seq_id=5)
    pending = await asyncio.gather(*(model.forward_backward(DATA * n) for n in range(1, 21)))
    assert [p.seq_id for p in pending] == list(range(5, 25))
    losses = [done.metrics["loss:sum"] for done in await asyncio.gather(*pending)]
    assert losses == [float(n) for n in range(1, 21)]
    assert model.next_seq_id == 25


async def test_a_refusal_carries_category_and_field(client: Client, server: Server) -> None:
    with pytest.raises(OperationFailed, match="my-model#0 failed, category user: there is no base") as caught:
        await client.create_model("my-model", base_model="missing")
    assert (caught.value.category, caught.value.field) == ("user", "base_model")
    assert caught.value.error == "there is no base model 'missing'"


async def test_a_result_has_a_time_and_can_be_asked_for_again(client: Client, bus: Bus) -> None:
    pending = await client.attach("m", next_seq_id=1).optim_step()
    with pytest.raises(TimeoutError, match=r"no result of m#1 within 0\.1 s"):
        await pending.result(0.1)
    server = asyncio.create_task(Server(bus).run())
    assert (await pending).metrics == {"lr:max": 1e-4}
    server.cancel()


async def test_a_result_of_another_kind_says_that_somebody_else_writes(
    client: Client, server: Server
) -> None:
    await (await client.attach("m", next_seq_id=1).optim_step())
    mine = await client.attach("m", next_seq_id=1).forward_backward(DATA)
    with pytest.raises(TypeError, match="another writer used this number"):
        await mine


async def test_results_arrive_over_a_restart_of_the_broker(
    broker: EmbeddedBroker, client: Client, bus: Bus
) -> None:
    model = client.attach("m", next_seq_id=1)
    first = await model.optim_step()
    waiting = asyncio.create_task(first.result())
    await asyncio.sleep(0.1)
    await asyncio.to_thread(broker.restart, kill=True)
    second = await model.optim_step()
    server = asyncio.create_task(Server(bus).run())
    async with asyncio.timeout(15):
        await waiting
        await second
    server.cancel()


async def test_a_missed_message_is_fetched_after_reconnecting(
    broker: EmbeddedBroker, bus: Bus, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "_POLL_S", 100.0)
    async with await connect(proxy.url, tenant="demo", password="demo-password") as client:
        pending = await client.attach("m", next_seq_id=1).optim_step()
        waiting = asyncio.create_task(pending.result())
        await asyncio.sleep(0.1)
        proxy.muted = True
        done = OptimStepDone(metrics={"grad_norm:max": 2.0})
        result = Result(request_id="m#1", model_id="m", seq_id=1, outcome=done)
        await Results(bus).publish("demo", result)
        await asyncio.sleep(0.1)
        proxy.muted = False
        proxy.cut()
        async with asyncio.timeout(50):
            assert await waiting == done


async def test_a_full_queue_is_waited_for_and_then_told(client: Client, bus: Bus) -> None:
    await ensure_streams(bus, submit_max_msgs_per_model=2)
    model = client.attach("m", next_seq_id=1)
    await model.optim_step()
    await model.optim_step()
    model.submit_timeout_s = 0.3
    with pytest.raises(QueueFull):
        await model.optim_step()
    assert model.next_seq_id == 3
    model.submit_timeout_s = 20
    waiting = asyncio.create_task(model.optim_step())
    await asyncio.sleep(0.2)
    server = asyncio.create_task(Server(bus).run())
    assert (await waiting).seq_id == 3
    server.cancel()


async def test_an_unconfirmed_operation_bars_the_next_one_until_it_is_resent(
    broker: EmbeddedBroker, bus: Bus, proxy: Proxy
) -> None:
    async with await connect(proxy.url, tenant="demo", password="demo-password") as client:
        model = client.attach("m", next_seq_id=1)
        with pytest.raises(ValueError, match="no operation of model 'm' is unconfirmed"):
            await model.resend()
        proxy.muted = True
        model.submit_timeout_s = 0.2
        with pytest.raises(Unconfirmed, match="may or may not be stored"):
            await model.optim_step(learning_rate=0.5)
        with pytest.raises(
            Unconfirmed, match="operation 1 of model 'm' may or may not be stored: call resend"
        ):
            await model.optim_step()
        proxy.muted = False
        proxy.cut()
        model.submit_timeout_s = 20
        pending = await model.resend()
        assert pending.seq_id == 1
        await model.optim_step()
        server = Server(bus)
        running = asyncio.create_task(server.run())
        assert (await pending).metrics == {"lr:max": 0.5}
        await until(lambda: {s.seq_id for s in server.seen} == {1, 2})
        running.cancel()


async def test_a_cancelled_call_counts_as_unconfirmed(client: Client, server: Server) -> None:
    model = client.attach("m", next_seq_id=1)
    call = asyncio.create_task(model.optim_step())
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    with pytest.raises(Unconfirmed):
        await model.optim_step()
    await (await model.resend())
    assert (await model.optim_step()).seq_id == 2


async def test_wrong_credentials_and_wrong_words_are_refused(broker: EmbeddedBroker, client: Client) -> None:
    with pytest.raises(WrongCredentials, match="refuses user 'demo'"):
        await connect(broker.url, tenant="demo", password="x")
    model = client.attach("m", next_seq_id=1)
    with pytest.raises(TypeError, match="lr"):
        await model.optim_step(lr=1e-3)
    with pytest.raises(TypeError, match="not both"):
        await model.optim_step(AdamParams(), beta1=0.5)


async def test_waiting_on_a_closed_client_ends(client: Client) -> None:
    pending = await client.attach("m", next_seq_id=1).optim_step()
    waiting = asyncio.create_task(pending.result())
    await asyncio.sleep(0.1)
    began = time.monotonic()
    await client.close()
    with pytest.raises(BrokerUnreachable):
        await waiting
    assert time.monotonic() - began < 15
