from __future__ import annotations

import asyncio

import pytest

from bus import submit
from bus.codec import JSON, MSGPACK, PROTOBUF, CodecError, encode
from bus.connection import Bus, MessageTooLarge, NotAllowed
from bus.embedded import EmbeddedBroker
from bus.events import Datum, ForwardBackward, LossChoice, OptimStep, Submission, Tensor
from bus.streams import ensure_streams
from bus.submit import QueueFull, SubmitReader, Submitted, Submitter
from bus.wire import ForwardBackwardRequest
from tests.bus import raw
from tests.bus.proxy import Proxy
from tests.bus.waiting import until


def step(seq_id: int) -> Submission:
    return Submission(seq_id=seq_id, op=OptimStep())


async def take(reader: SubmitReader, count: int) -> list[Submitted]:
    """The next `count` submissions, each acknowledged."""
    found = []
    async with asyncio.timeout(20):
        async for submitted in reader.read():
            found.append(submitted)
            await submitted.ack()
            if len(found) == count:
                return found
    raise AssertionError("the queue ended")


def number(submitted: Submitted) -> int | None:
    assert isinstance(submitted.submission, Submission)
    return submitted.submission.seq_id


async def queued(bus: Bus) -> int:
    return int((await bus.js.stream_info("TINKER_SUBMIT")).state.messages)


@pytest.mark.parametrize("content_type", [MSGPACK, JSON])
async def test_what_a_tenant_submits_reaches_the_intake(bus: Bus, demo_bus: Bus, content_type: str) -> None:
    await Submitter(demo_bus, "demo").submit("m:1", step(4), content_type)
    (found,) = await take(SubmitReader(bus), 1)
    assert (found.tenant, found.model_id, found.content_type) == ("demo", "m:1", content_type)
    assert found.submission == step(4)
    assert found.body == encode(step(4), content_type)
    await until(lambda: _empty(bus))


async def _empty(bus: Bus) -> bool:
    return await queued(bus) == 0


async def test_the_queue_goes_on_with_what_comes_and_seen_at_once(bus: Bus, demo_bus: Bus) -> None:
    submitter = Submitter(demo_bus, "demo")
    reading = asyncio.create_task(take(SubmitReader(bus), 200))
    await asyncio.sleep(0.2)
    for seq_id in range(1, 201):
        await submitter.submit("m", step(seq_id))
    async with asyncio.timeout(20):
        assert [number(s) for s in await reading] == list(range(1, 201))


async def test_two_readers_share_the_queue(bus: Bus, second_bus: Bus, demo_bus: Bus) -> None:
    submitter = Submitter(demo_bus, "demo")
    seen: list[int | None] = []

    async def work(reader: SubmitReader) -> None:
        async for submitted in reader.read():
            seen.append(number(submitted))
            await submitted.ack()

    workers = [asyncio.create_task(work(SubmitReader(b))) for b in (bus, second_bus)]
    for seq_id in range(1, 101):
        await submitter.submit("m", step(seq_id))
    await until(lambda: len(seen) >= 100)
    assert sorted(seen, key=lambda n: n or 0) == list(range(1, 101))
    for worker in workers:
        worker.cancel()


async def test_a_negative_answer_brings_it_again_and_a_final_one_does_not(bus: Bus, demo_bus: Bus) -> None:
    submitter = Submitter(demo_bus, "demo")
    await submitter.submit("m", step(1))
    await submitter.submit("m", step(2))
    seen = []
    async with asyncio.timeout(10):
        async for submitted in SubmitReader(bus).read():
            seen.append(number(submitted))
            if len(seen) == 3:
                await submitted.ack()
                break
            await (submitted.nak(0.1) if number(submitted) == 1 else submitted.term())
    assert seen == [1, 2, 1]
    await until(lambda: _empty(bus))


async def test_what_was_not_acknowledged_is_still_there_for_the_next_reader(
    broker: EmbeddedBroker, bus: Bus, demo_bus: Bus
) -> None:
    await Submitter(demo_bus, "demo").submit("m", step(1))
    async for _ in SubmitReader(bus).read():
        break
    assert await queued(bus) == 1


async def test_a_reader_that_is_closed_gives_back_what_it_had_fetched(
    bus: Bus, second_bus: Bus, demo_bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "_ACK_WAIT_S", 100.0)
    submitter = Submitter(demo_bus, "demo")
    for seq_id in range(1, 6):
        await submitter.submit("m", step(seq_id))
    reading = SubmitReader(bus).read()
    await (await anext(reading)).ack()
    await reading.aclose()
    async with asyncio.timeout(50):
        assert sorted(number(s) or 0 for s in await take(SubmitReader(second_bus), 4)) == [2, 3, 4, 5]


async def test_a_submission_that_cannot_be_understood_comes_with_the_reason(bus: Bus, demo_bus: Bus) -> None:
    subject = "tinker.v1.submit.demo.m"
    await demo_bus.js.publish(
        subject, b'{"seq_id": 3, "op": {"type": "dance"}}', headers={"Content-Type": JSON}
    )
    await demo_bus.js.publish(subject, b"?", headers={"Content-Type": "text/plain"})
    await demo_bus.js.publish(subject, b"\xc1")
    first, second, third = await take(SubmitReader(bus), 3)
    assert isinstance(first.submission, CodecError)
    assert first.submission.seq_id == 3
    assert isinstance(second.submission, CodecError)
    assert second.submission.field == "content_type"
    assert isinstance(third.submission, CodecError)


async def test_a_protobuf_body_must_name_the_model_of_its_subject(bus: Bus, demo_bus: Bus) -> None:
    request = ForwardBackwardRequest(model_id="m", seq_id=2, loss_fn="cross_entropy")
    request.data.add().model_input.add().encoded_text.tokens = b"\1\0\0\0"
    headers = {"Content-Type": PROTOBUF}
    for model in ("m", "another"):
        await demo_bus.js.publish(
            f"tinker.v1.submit.demo.{model}", request.SerializeToString(), headers=headers
        )
    right, wrong = await take(SubmitReader(bus), 2)
    assert number(right) == 2
    assert isinstance(wrong.submission, CodecError)
    assert (wrong.submission.field, wrong.submission.seq_id) == ("model_id", 2)


async def test_a_subject_that_is_no_escaped_id_is_dropped_and_counted(bus: Bus, demo_bus: Bus) -> None:
    await demo_bus.js.publish("tinker.v1.submit.demo.=zz", b"x")
    await Submitter(demo_bus, "demo").submit("m", step(1))
    reader = SubmitReader(bus)
    assert [s.model_id for s in await take(reader, 1)] == ["m"]
    assert reader.skipped == 1


@pytest.mark.parametrize("user", ["demo", "server"])  # a server publishes as on a broker without accounts
@pytest.mark.parametrize(
    ("subject", "headers"),
    [
        (b"m", b"NATS/1.0"),
        (b"m", b"?"),
        (b"m", b"NATS/1.0 \xff\xff\xff\r\n\r\n"),
        (b"m", b"NATS/1.0 404 \xff\r\n\r\n"),
        (b"m", b"NATS/1.0\r\n\xff\xfe: \xff\r\n\r\n"),
        (b"m", b"NATS/1.0\r\nno colon\r\n\r\n"),
        (b"m", b"NATS/1.0\r\nStatus: 100\r\n\r\n"),
        (b"m", b"NATS/1.0 409 Consumer Deleted\r\n\r\n"),
        (b"\xff\xfe", b"NATS/1.0\r\n\r\n"),
    ],
)
async def test_no_bytes_of_a_publisher_stop_the_intake(
    broker: EmbeddedBroker, bus: Bus, demo_bus: Bus, subject: bytes, headers: bytes, user: str
) -> None:
    credentials = broker.credentials if user == "server" else broker.tenant_credentials("demo")
    await raw.publish(broker.url, credentials, b"tinker.v1.submit.demo." + subject, headers, b"x")
    await Submitter(demo_bus, "demo").submit("m", step(1))
    reader = SubmitReader(bus)
    found = await take(reader, 2 - (subject != b"m"))
    assert found[-1].submission == step(1)
    assert reader.skipped == (subject != b"m")
    await until(lambda: _empty(bus))


async def test_a_full_queue_refuses_that_model_alone(bus: Bus, demo_bus: Bus) -> None:
    await ensure_streams(bus, submit_max_msgs_per_model=2)
    submitter = Submitter(demo_bus, "demo")
    await submitter.submit("m", step(1))
    await submitter.submit("m", step(2))
    with pytest.raises(QueueFull, match="submitting number 3 of model 'm' is refused"):
        await submitter.submit("m", step(3))
    await submitter.submit("another", step(1))
    await take(SubmitReader(bus), 3)
    await until(lambda: _empty(bus))
    await submitter.submit("m", step(3))


async def test_another_tenants_queue_is_closed(demo_bus: Bus) -> None:
    with pytest.raises(NotAllowed):
        await Submitter(demo_bus, "other").submit("m", step(1))


async def test_a_batch_above_the_brokers_limit_is_refused_with_both_sizes(demo_bus: Bus) -> None:
    tensor = Tensor(dtype="int32", shape=(3_000_000,), data=bytes(12_000_000))
    op = ForwardBackward(data=(Datum(model_input=tensor, loss_fn_inputs={}),), loss=LossChoice(name="x"))
    with pytest.raises(MessageTooLarge, match=r"has 12000\d\d\d bytes; the broker takes 8387584"):
        await Submitter(demo_bus, "demo").submit("m", Submission(seq_id=1, op=op))
    await Submitter(demo_bus, "demo").submit("m", step(1))


async def test_the_queue_is_read_over_restarts_of_the_broker(
    broker: EmbeddedBroker, bus: Bus, demo_bus: Bus
) -> None:
    submitter = Submitter(demo_bus, "demo")
    seen: set[int | None] = set()

    async def work() -> None:
        async for submitted in SubmitReader(bus).read():
            seen.add(number(submitted))
            await submitted.ack()

    worker = asyncio.create_task(work())
    await submitter.submit("m", step(1))
    await until(lambda: seen == {1})
    await asyncio.to_thread(broker.restart, kill=True)
    await submitter.submit("m", step(2))
    await until(lambda: seen == {1, 2})
    worker.cancel()


async def test_the_queue_is_read_on_after_silence(
    bus: Bus, demo_bus: Bus, frail_bus: Bus, proxy: Proxy
) -> None:
    seen: set[int | None] = set()

    async def work() -> None:
        async for submitted in SubmitReader(frail_bus).read():
            seen.add(number(submitted))
            await submitted.ack()

    worker = asyncio.create_task(work())
    submitter = Submitter(demo_bus, "demo")
    await submitter.submit("m", step(1))
    await until(lambda: seen == {1})
    proxy.muted = True
    await asyncio.sleep(0.1)
    proxy.cut()
    proxy.muted = False
    await submitter.submit("m", step(2))
    await until(lambda: seen == {1, 2})
    worker.cancel()


async def test_a_repeated_submission_is_delivered_each_time_and_stays_the_same(
    bus: Bus, demo_bus: Bus
) -> None:
    submitter = Submitter(demo_bus, "demo")
    await submitter.submit("m", step(1))
    await submitter.submit("m", step(1))
    first, second = await take(SubmitReader(bus), 2)
    assert first.body == second.body
