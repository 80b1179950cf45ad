"""The official SDK, unmodified, against the ingress over a real broker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import tinker
from tinker import types

from bus.connection import BrokerUnreachable
from bus.embedded import EmbeddedBroker
from bus.events import Checkpoint, CreateModel, LoadWeights
from bus.log import Appended, LogEntry, OpsLog
from runtime.config import Client
from tests.runtime.conftest import PASSWORDS, service_on
from tests.runtime.stand_in import CONTEXT, MODEL_DIR, Replica, Service

WAIT_S = 20

Connect = Callable[..., tinker.ServiceClient]


async def blocking(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The SDK's blocking calls have an event loop of their own; ours serves them meanwhile."""
    return await asyncio.wait_for(asyncio.to_thread(function, *args, **kwargs), WAIT_S)


async def result(future: Any) -> Any:
    return await blocking(future.result, WAIT_S)


async def create(client: tinker.ServiceClient, base_model: str = "tiny") -> tinker.TrainingClient:
    return await result(await blocking(client.create_lora_training_client, base_model=base_model, rank=4))


async def finished(client: tinker.ServiceClient) -> None:
    await result(await blocking(client.close, "success"))


def datum(*targets: int) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(targets)),
        loss_fn_inputs={"target_tokens": list(targets), "weights": [1.0] * len(targets)},
    )


@contextlib.asynccontextmanager
async def connected(replica: Replica) -> AsyncIterator[tinker.ServiceClient]:
    client = tinker.ServiceClient(base_url=replica.url, api_key="tml-alice")
    yield client
    await finished(client)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_PROJECT_ID", "TINKER_TAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Clients that are closed when the test ends, before the server is."""
    opened: list[tinker.ServiceClient] = []

    def start(replica: Replica, key: str = "tml-alice") -> tinker.ServiceClient:
        opened.append(tinker.ServiceClient(base_url=replica.url, api_key=key))
        return opened[-1]

    yield start
    for client in opened:
        await finished(client)


@pytest.fixture
async def training(ingress: Replica, connect: Connect) -> tinker.TrainingClient:
    return await create(connect(ingress))


async def test_a_model_is_created_and_described(training: tinker.TrainingClient) -> None:
    info = await blocking(training.get_info)
    assert info.model_id.endswith(":train:0")
    assert (info.model_name, info.is_lora, info.lora_rank) == ("tiny", True, 4)
    assert info.model_data.tokenizer_id == MODEL_DIR


async def test_capabilities(ingress: Replica, connect: Connect) -> None:
    served = await blocking(connect(ingress).get_server_capabilities)
    assert [(model.model_name, model.max_context_length) for model in served.supported_models] == [
        ("tiny", CONTEXT)
    ]


async def test_forward_gives_each_datum_its_own_logprobs(training: tinker.TrainingClient) -> None:
    done = await result(await blocking(training.forward, [datum(8, 16, 24), datum(80)], "cross_entropy"))
    rows = [output["logprobs"].tolist() for output in done.loss_fn_outputs]
    assert rows == [[-1.0, -2.0, -3.0], [-10.0]]
    assert done.metrics["loss:sum"] == 16.0
    assert done.metrics["forward_only:max"] == 1.0


async def test_passes_and_steps_sent_without_waiting_run_in_the_order_sent(
    training: tinker.TrainingClient, service: Service
) -> None:
    futures = []
    for step in range(3):
        futures.append(await blocking(training.forward_backward, [datum(8 * step)], "cross_entropy"))
        futures.append(await blocking(training.optim_step, types.AdamParams(learning_rate=step)))
    results = [await result(future) for future in futures]
    assert [done.metrics["loss:sum"] for done in results[::2]] == [0.0, 1.0, 2.0]
    assert [done.metrics["learning_rate"] for done in results[1::2]] == [0.0, 1.0, 2.0]
    assert results[1].metrics["norm"] == float("inf")
    verbs = [verb for _, _, verb in service.dispatcher.ran]
    assert verbs == ["create_model", *["forward_backward", "optim_step"] * 3]


async def test_chunks_that_come_out_of_order_run_in_order_and_merge_in_order(
    training: tinker.TrainingClient, service: Service
) -> None:
    """Two datums a request: seven make four, of which the first is posted last."""
    call = await blocking(training.forward_backward, [datum(8 * i) for i in range(7)], "cross_entropy")
    step = await blocking(training.optim_step, types.AdamParams())
    done = await result(call)
    await result(step)
    assert [output["logprobs"].tolist() for output in done.loss_fn_outputs] == [[-float(i)] for i in range(7)]
    assert done.metrics["loss:sum"] == 21.0
    assert [seq for _, seq, _ in service.dispatcher.ran] == [0, 1, 2, 3, 4, 5]
    positions = [(await service.log.get(service.dispatcher.ran[0][0], seq)) for seq in (1, 2)]
    assert positions[0] is not None
    assert positions[1] is not None
    assert (positions[0].position or 0) > (positions[1].position or 0), "chunk 1 is posted after chunk 2"


async def test_a_failed_pass_raises_its_reason_and_the_client_goes_on(
    training: tinker.TrainingClient,
) -> None:
    failing = await blocking(training.forward_backward, [datum(8)], "nonsense")
    with pytest.raises(tinker.RequestFailedError, match=r"loss\.name 'nonsense' is not registered") as caught:
        await result(failing)
    assert caught.value.category == types.RequestErrorCategory.User
    done = await result(await blocking(training.forward_backward, [datum(8)], "cross_entropy"))
    assert done.metrics["loss:sum"] == 1.0


async def test_saving_and_loading_answer_in_the_sdks_forms(
    training: tinker.TrainingClient, service: Service
) -> None:
    saved = await result(await blocking(training.save_state, "a"))
    assert saved.path.endswith("/weights/a")
    for_sampler = await result(await blocking(training.save_weights_for_sampler, "a"))
    assert for_sampler.path.endswith("/sampler_weights/a")
    exported = await result(await blocking(training.save_weights_external, "a"))
    assert exported.path.endswith("/external_weights/a")
    loaded = await result(await blocking(training.load_state_with_optimizer, saved.path))
    assert loaded.path == saved.path
    asked = [op for (_, seq_id), op in service.dispatcher.asked.items() if seq_id]
    assert asked[3] == LoadWeights(checkpoint=Checkpoint(path=saved.path, optimizer=True))


async def test_a_client_out_of_a_checkpoint_is_one_load_under_the_id_that_it_works_out(
    ingress: Replica, connect: Connect, service: Service
) -> None:
    path = "tinker://run/weights/x"
    client = await blocking(connect(ingress).create_training_client_from_state, path)
    assert (await result(await blocking(client.optim_step, types.AdamParams()))).metrics
    assert [verb for _, _, verb in service.dispatcher.ran] == ["create_model", "optim_step"]
    (op,) = service.dispatcher.asked.values()
    assert isinstance(op, CreateModel)
    assert op.start == Checkpoint(path=path, optimizer=False)


async def test_another_base_model_fails_at_creation(ingress: Replica, connect: Connect) -> None:
    client = connect(ingress)
    with pytest.raises(tinker.RequestFailedError, match="base_model 'gpt-5' is not served"):
        await create(client, "gpt-5")


async def test_a_wrong_key_fails_at_once(ingress: Replica, connect: Connect) -> None:
    client = connect(ingress, "tml-nobody")
    with pytest.raises(tinker.AuthenticationError, match="x-api-key"):
        await create(client)


async def test_long_polls_are_repeated_until_the_result_is_there(
    training: tinker.TrainingClient, service: Service
) -> None:
    service.dispatcher.go.clear()
    call = await blocking(training.forward_backward, [datum(8)], "cross_entropy")
    await asyncio.sleep(3 * service.settings.http.long_poll_s)
    service.dispatcher.go.set()
    assert (await result(call)).metrics["loss:sum"] == 1.0


async def test_a_custom_loss_goes_through_forward_and_backward(training: tinker.TrainingClient) -> None:
    """C = Σ lp²: the logprobs −1 and −2 give 5, whatever the server makes of the weights −2·lp."""

    def squares(_: Any, logprobs: Any) -> Any:
        loss = sum((row**2).sum() for row in logprobs)
        return loss, {"custom:sum": float(loss.detach())}

    call = await blocking(training.forward_backward_custom, [datum(8, 16)], squares)
    done = await result(call)
    assert done.metrics["loss:sum"] == 5.0


async def test_compressed_bodies_of_the_sdk(service: Service, connect: Connect) -> None:
    client = Client(proto_compress_fwdbwd=True, use_pyqwest_transport=False)
    replica = await service.replica(msgspec.structs.replace(service.settings, client=client))
    training = await create(connect(replica))
    done = await result(await blocking(training.forward_backward, [datum(8)] * 50, "cross_entropy"))
    assert done.metrics["loss:sum"] == 50.0


async def test_the_sdks_default_transport(service: Service, connect: Connect) -> None:
    replica = await service.replica(msgspec.structs.replace(service.settings, client=Client()))
    training = await create(connect(replica))
    assert (await result(await blocking(training.forward, [datum(8)], "cross_entropy"))).metrics[
        "loss:sum"
    ] == 1.0


async def test_closing_the_client_ends_session_and_model(
    training: tinker.TrainingClient, ingress: Replica, connect: Connect, service: Service
) -> None:
    client = connect(ingress)
    ending = await create(client)
    ended = (await blocking(ending.get_info)).model_id
    await finished(client)
    assert await service.results.wait("alice", ended, None, WAIT_S) is not None
    assert (await blocking(training.get_info)).model_id != ended


async def test_a_post_whose_answer_was_lost_is_sent_again_and_runs_once(
    service: Service, connect: Connect
) -> None:
    """The SDK sees 429 although the broker has stored the request, as when the answer comes too late."""

    class LosesFirstAnswers(OpsLog):
        lost: ClassVar[set[str]] = set()

        async def append(self, entry: LogEntry, **options: Any) -> Appended:
            appended = await super().append(entry, **options)
            if entry.seq_id in (1, 2) and entry.request_id not in self.lost:
                self.lost.add(entry.request_id)
                raise BrokerUnreachable("the answer was lost")
            return appended

    replica = await service.replica(log=LosesFirstAnswers(service.bus, service.group))
    training = await create(connect(replica))
    call = await blocking(
        training.forward_backward, [datum(8)], "cross_entropy", {"beta": 0.5, "a": 1, "z": 2}
    )
    step = await blocking(training.optim_step, types.AdamParams())
    assert (await result(call)).metrics["loss:sum"] == 1.0
    assert (await result(step)).metrics
    assert [seq for _, seq, _ in service.dispatcher.ran] == [0, 1, 2]
    assert len(LosesFirstAnswers.lost) == 2


async def test_training_goes_on_when_the_broker_is_killed_and_comes_back(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path / "broker", PASSWORDS) as broker:
        async with service_on(broker, tmp_path) as service, connected(await service.replica()) as client:
            training = await create(client)

            async def passes(numbers: range) -> list[Any]:
                return [
                    await blocking(training.forward_backward, [datum(8 * i)], "cross_entropy")
                    for i in numbers
                ]

            calls = await passes(range(3))
            restarting = asyncio.create_task(asyncio.to_thread(broker.restart, kill=True, down_s=0.5))
            calls += await passes(range(3, 6))
            await restarting
            assert [(await result(call)).metrics["loss:sum"] for call in calls] == [
                0.0,
                1.0,
                2.0,
                3.0,
                4.0,
                5.0,
            ]
            assert [seq for _, seq, _ in service.dispatcher.ran] == list(range(7))
