"""From event clients to the log: the tenant's own connection, a real broker, the intake between them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bus import subjects
from bus.backlog import Backlog
from bus.client import Client, LoraConfig, Model, OperationFailed, connect, datum
from bus.codec import JSON, MSGPACK, PROTOBUF
from bus.embedded import EmbeddedBroker
from bus.events import OptimStep, Submission, UnloadModel
from bus.streams import ensure_streams
from bus.submit import QueueFull, SubmitReader
from runtime.admission import Admission
from runtime.config import Limits
from runtime.intake import Intake, hold_s
from tests.bus.waiting import until
from tests.runtime.conftest import ALICE, BOB, PASSWORDS, service_on
from tests.runtime.ingress.conftest import Wire, client, sdk_body
from tests.runtime.stand_in import Service, running

WAIT_S = 10
LORA = LoraConfig(rank=4)


@contextlib.asynccontextmanager
async def taking(service: Service, limits: Limits | None = None) -> AsyncIterator[Intake]:
    """An intake at work; it leaves the queue empty, which all tests share."""
    backlog = await Backlog.open(service.bus, service.tables.backlogs, service.group)
    admission = Admission(limits or Limits(), backlog, service.ledger)
    intake = Intake(service.bus, service.log, service.tables, service.results, admission)
    async with running(intake.run()):
        yield intake
        async with asyncio.timeout(WAIT_S):
            while (await service.bus.js.stream_info(subjects.SUBMIT_STREAM)).state.messages:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@pytest.fixture
async def intake(service: Service) -> AsyncIterator[Intake]:
    async with taking(service) as started:
        yield started


@contextlib.asynccontextmanager
async def tenant(service: Service, name: str) -> AsyncIterator[Client]:
    async with await connect(service.broker_url, tenant=name, password=PASSWORDS[name]) as connected:
        yield connected


@pytest.fixture
async def alice(service: Service, intake: Intake) -> AsyncIterator[Client]:
    async with tenant(service, ALICE) as connected:
        yield connected


@pytest.fixture
async def bob(service: Service, intake: Intake) -> AsyncIterator[Client]:
    async with tenant(service, BOB) as connected:
        yield connected


@pytest.fixture
def model_id() -> str:
    return f"model-{secrets.token_hex(4)}"


async def publish(
    service: Service, model_id: str, body: bytes, content_type: str = MSGPACK, who: str = ALICE
) -> None:
    """What a client without our library does: one publish, and the broker's acknowledgement."""
    await service.bus.js.publish(subjects.submit(who, model_id), body, headers={"Content-Type": content_type})


async def error_of(model: Model, seq_id: int | None) -> str:
    """The user error under a number."""
    stored = await model._client._results.wait(model._client.tenant, model.model_id, seq_id, WAIT_S)
    assert stored is not None
    outcome: Any = stored.result().outcome
    assert outcome.category == "user"
    return f"{outcome.field}|{outcome.error}"


async def test_a_model_is_trained_from_creation_to_end(
    alice: Client, service: Service, model_id: str
) -> None:
    model = await alice.create_model(model_id, base_model="tiny", lora=LORA, user_metadata={"a": "b"})
    call = await model.forward_backward([datum([1, 2], target_tokens=[8, 16])])
    step = await model.optim_step(learning_rate=0.5)
    assert (await call.result(WAIT_S)).metrics["loss:sum"] == 3.0
    assert (await step.result(WAIT_S)).metrics["learning_rate"] == 0.5
    assert (await model.unload()).model_id == model_id
    verbs = [verb for _, _, verb in service.dispatcher.ran]
    assert verbs == ["create_model", "forward_backward", "optim_step", "unload_model"]
    found = await service.tables.models.get(model_id)
    assert found is not None
    row = found[0]
    assert (row.tenant, row.session_id, row.lora, row.user_metadata) == (ALICE, None, LORA, {"a": "b"})


async def test_what_is_submitted_twice_runs_once(alice: Client, service: Service, model_id: str) -> None:
    model = await alice.create_model(model_id, base_model="tiny", lora=LORA)
    submission = Submission(seq_id=1, op=OptimStep())
    for _ in range(3):
        await publish(service, model_id, msgspec.msgpack.encode(submission))
    await publish(service, model_id, msgspec.json.encode(submission), JSON)
    await (await alice.attach(model_id, 2).optim_step()).result(WAIT_S)
    assert [seq for _, seq, _ in service.dispatcher.ran] == [0, 1, 2]
    del model


async def test_another_body_under_a_taken_number_changes_nothing(alice: Client, model_id: str) -> None:
    model = await alice.create_model(model_id, base_model="tiny", lora=LORA)
    first = await model.optim_step(learning_rate=0.25)
    await first.result(WAIT_S)
    other = await alice.attach(model_id, 1).optim_step(learning_rate=0.5)
    after = await alice.attach(model_id, 2).optim_step()
    await after.result(WAIT_S)
    assert (await other.result(WAIT_S)).metrics["learning_rate"] == 0.25


@pytest.mark.parametrize(
    ("body", "content_type", "field"),
    [
        (b'{"seq_id": 1, "op": {"type": "optim_step", "foo": 1}}', JSON, "foo"),
        (
            b'{"seq_id": 1, "op": {"type": "optim_step", "adam_params": {"beta1": "x"}}}',
            JSON,
            "adam_params.beta1",
        ),
        (b'{"seq_id": 1, "op": {"type": "refused", "error": "x"}}', JSON, "type"),
        (b'{"seq_id": 1, "op": {"type": "create_model", "base_model": "tiny"}}', JSON, "seq_id"),
        (b'{"seq_id": 1, "op": {"type": "optim_step"}, "format": 99}', JSON, "format"),
    ],
)
async def test_a_submission_that_cannot_be_understood_uses_up_its_number_and_names_the_field(
    alice: Client, service: Service, model_id: str, body: bytes, content_type: str, field: str
) -> None:
    model = await alice.create_model(model_id, base_model="tiny", lora=LORA)
    await publish(service, model_id, body, content_type)
    assert (await error_of(model, 1)).startswith(field)
    await (await alice.attach(model_id, 2).optim_step()).result(WAIT_S)


async def test_a_model_whose_id_is_too_long_for_the_broker_is_dropped_and_harms_nobody(
    alice: Client, intake: Intake, service: Service, model_id: str
) -> None:
    """The broker takes the publish, and would hang up on the server that names the model in a longer subject."""
    await publish(
        service, "x" * 3900, b'{"seq_id": 0, "op": {"type": "create_model", "base_model": "tiny"}}', JSON
    )
    model = await alice.create_model(model_id, base_model="tiny", lora=LORA)
    await (await model.optim_step()).result(WAIT_S)
    assert intake.dropped == 1


async def test_a_submission_without_a_number_is_dropped_and_counted(
    alice: Client, intake: Intake, service: Service, model_id: str
) -> None:
    for body in (b"", b"\xc1", b'{"op": {"type": "optim_step"}}'):
        await publish(service, model_id, body, JSON)
    model = await alice.create_model(model_id, base_model="tiny", lora=LORA)
    await (await model.optim_step()).result(WAIT_S)
    assert intake.dropped == 3


async def test_the_sdks_protobuf_is_a_submission_too(alice: Client, service: Service, model_id: str) -> None:
    model = await alice.create_model(model_id, base_model="tiny", lora=LORA)
    await publish(service, model_id, sdk_body(model_id, 1, [8, 8]), PROTOBUF)
    await publish(service, model_id, sdk_body("another", 2), PROTOBUF)
    stored = await model._client._results.wait(ALICE, model_id, 1, WAIT_S)
    assert stored is not None
    outcome: Any = stored.result().outcome
    assert outcome.metrics["loss:sum"] == 2.0
    assert "another" in await error_of(model, 2)


async def test_a_model_made_over_http_is_continued_over_the_bus(alice: Client, service: Service) -> None:
    replica = await service.replica()
    async with client(replica.url, "tml-alice") as http:
        wire = Wire(http)
        model_id = await wire.model()
        await wire.result(await wire.optim_step(model_id, 1))
        step = await alice.attach(model_id, 2).optim_step(learning_rate=0.125)
        assert (await step.result(WAIT_S)).metrics["learning_rate"] == 0.125
        assert (await wire.settled(f"{model_id}#2")).json()["metrics"]["learning_rate"] == 0.125


async def test_a_foreign_model_fails_for_the_sender_and_never_reaches_its_log(
    alice: Client, bob: Client, service: Service, model_id: str
) -> None:
    mine = await alice.create_model(model_id, base_model="tiny", lora=LORA)
    theirs = bob.attach(model_id, 1)
    await theirs.optim_step()
    assert "is taken" in await error_of(theirs, 1)
    with pytest.raises(OperationFailed, match="is taken"):
        await bob.create_model(model_id, base_model="tiny", lora=LORA)
    await theirs._client._submitter.submit(model_id, Submission(seq_id=None, op=UnloadModel()))
    assert "is taken" in await error_of(theirs, None)
    assert await service.log.get(model_id, 1) is None
    await (await mine.optim_step()).result(WAIT_S)
    assert [seq for _, seq, _ in service.dispatcher.ran] == [0, 1]


async def test_an_operation_of_a_model_that_nobody_made_fails_at_once_and_for_good(
    alice: Client, model_id: str
) -> None:
    lost = alice.attach(model_id, 5)
    await lost.optim_step()
    await lost.optim_step()
    assert "seq_id 0 has to create it" in await error_of(lost, 5)
    assert "seq_id 0 has to create it" in await error_of(lost, 6)
    with pytest.raises(OperationFailed, match="seq_id 0 has to create it"):
        await alice.create_model(model_id, base_model="tiny", lora=LORA)


async def test_an_operation_that_overtook_its_creation_waits_for_it(
    service: Service, alice_alone: Client, model_id: str
) -> None:
    """As after the death of an intake that held the creation: it comes again, later than what followed it."""
    alice = alice_alone
    creating = asyncio.create_task(alice.create_model(model_id, base_model="tiny", lora=LORA))
    async with contextlib.aclosing(SubmitReader(service.bus).read()) as dying:
        held = await anext(dying)
    step = await alice.attach(model_id, 1).optim_step()
    async with taking(service):
        await asyncio.sleep(0.2)
        await held.nak(0)
        await asyncio.wait_for(creating, WAIT_S)
        await step.result(WAIT_S)


@pytest.fixture
async def alice_alone(service: Service) -> AsyncIterator[Client]:
    async with tenant(service, ALICE) as connected:
        yield connected


async def test_two_intakes_append_once(
    service: Service, intake: Intake, alice: Client, model_id: str
) -> None:
    async with taking(service):
        model = await alice.create_model(model_id, base_model="tiny", lora=LORA)
        pending = [await model.optim_step(learning_rate=i) for i in range(20)]
        rates = [(await step.result(WAIT_S)).metrics["learning_rate"] for step in pending]
    assert rates == [float(i) for i in range(20)]
    assert [seq for _, seq, _ in service.dispatcher.ran] == list(range(21))


async def test_a_broker_killed_while_submissions_come_in_loses_and_doubles_none(
    tmp_path: Path, model_id: str
) -> None:
    with EmbeddedBroker(tmp_path / "broker", PASSWORDS) as broker:
        async with service_on(broker, tmp_path) as service, taking(service), tenant(service, ALICE) as alice:
            model = await alice.create_model(model_id, base_model="tiny", lora=LORA)
            first = [await model.optim_step(learning_rate=i) for i in range(5)]
            restarting = asyncio.create_task(asyncio.to_thread(broker.restart, kill=True))
            second = [await model.optim_step(learning_rate=i) for i in range(5, 10)]
            await restarting
            rates = [(await step.result(WAIT_S)).metrics["learning_rate"] for step in first + second]
    assert rates == [float(i) for i in range(10)]
    assert [seq for _, seq, _ in service.dispatcher.ran] == list(range(11))


async def test_what_an_intake_had_fetched_when_it_stopped_goes_to_the_next_at_once(
    service: Service, alice_alone: Client, model_id: str
) -> None:
    creating = asyncio.create_task(alice_alone.create_model(model_id, base_model="tiny", lora=LORA))
    async with contextlib.aclosing(SubmitReader(service.bus).read()) as stopping:
        held = await anext(stopping)
        model = alice_alone.attach(model_id, 1)
        steps = [await model.optim_step(learning_rate=i) for i in range(10)]
        await held.nak(0)
    async with taking(service):
        await asyncio.wait_for(creating, WAIT_S)
        assert [(await step.result(WAIT_S)).metrics["learning_rate"] for step in steps] == [
            float(i) for i in range(10)
        ]


async def test_past_the_limit_submissions_stay_in_the_queue_until_the_broker_refuses(
    service: Service, alice_alone: Client, model_id: str
) -> None:
    """Nothing that was acknowledged is lost, other models go on, and there is room again later."""
    other_id = f"{model_id}-other"
    await ensure_streams(service.bus, submit_max_msgs_per_model=3)
    try:
        async with taking(service, Limits(max_model_ops=4)):
            model = await alice_alone.create_model(model_id, base_model="tiny", lora=LORA)
            other = await alice_alone.create_model(other_id, base_model="tiny", lora=LORA)
            await service.quiet()
            service.dispatcher.go.clear()
            pending = [await model.optim_step(learning_rate=seq_id) for seq_id in range(1, 5)]
            await until(lambda: service.log.holds(model_id, 4))
            pending += [await model.optim_step(learning_rate=seq_id) for seq_id in range(5, 8)]
            model.submit_timeout_s = 0.5
            with pytest.raises(QueueFull):
                await model.optim_step(learning_rate=8)
            assert [await service.log.holds(model_id, seq_id) for seq_id in range(1, 8)] == [True] * 4 + [
                False
            ] * 3
            elsewhere = await other.optim_step(learning_rate=0.5)
            await until(lambda: service.log.holds(other_id, 1))
            service.dispatcher.go.set()
            model.submit_timeout_s = 20
            pending.append(await model.optim_step(learning_rate=8))
            rates = [(await step.result(WAIT_S)).metrics["learning_rate"] for step in pending]
            assert rates == [float(i) for i in range(1, 9)]
            assert (await elsewhere.result(WAIT_S)).metrics["learning_rate"] == 0.5
    finally:
        await ensure_streams(service.bus)


async def test_a_submission_whose_turn_it_is_gets_in_however_much_waits(
    service: Service, alice_alone: Client, model_id: str
) -> None:
    async with taking(service, Limits(max_model_ops=2)):
        await alice_alone.create_model(model_id, base_model="tiny", lora=LORA)
        await service.quiet()
        late = [await alice_alone.attach(model_id, seq_id).optim_step() for seq_id in (4, 3, 2)]
        await asyncio.sleep(0.3)
        first = await alice_alone.attach(model_id, 1).optim_step()
        for step in (first, *late):
            await step.result(WAIT_S)


def test_what_is_held_back_stays_away_longer_each_time_up_to_a_limit() -> None:
    assert [hold_s(deliveries) for deliveries in (1, 2, 3, 4, 5, 10**6)] == [0.25, 0.5, 1.0, 2.0, 4.0, 4.0]


async def test_a_datum_above_the_limit_is_refused_by_name_and_uses_up_its_number(
    service: Service, alice_alone: Client, model_id: str
) -> None:
    async with taking(service, Limits(max_datum_bytes=10_000)):
        model = await alice_alone.create_model(model_id, base_model="tiny", lora=LORA)
        fits, large = datum([1] * 500, target_tokens=[8] * 500), datum([1] * 2000, target_tokens=[8] * 2000)
        await model.forward_backward([fits, large])
        after = await model.forward_backward([fits, fits])
        error = await error_of(model, 1)
        assert error.startswith("data[1]|data[1] has 2")
        assert "the limit is 10000 (limits.max_datum_bytes)" in error
        assert (await after.result(WAIT_S)).metrics["loss:sum"] == 1000.0
