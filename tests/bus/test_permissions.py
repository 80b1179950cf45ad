"""What a tenant may do, and everything it may not. Attackers speak through an ordinary client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import nats
import nats.errors
import pytest
from nats.aio.client import Client

from bus.connection import Bus, connect
from bus.embedded import EmbeddedBroker
from bus.events import OptimStepDone, Result
from bus.results import Results
from bus.streams import ensure_streams
from tests.bus.conftest import TENANTS, UNSYNCED

GET = "$JS.API.DIRECT.GET.TINKER_RESULTS"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """One for all tests here: what a tenant did must not last, or these tests notice."""
    with EmbeddedBroker(tmp_path_factory.mktemp("broker"), TENANTS, sync_interval=UNSYNCED) as broker:
        yield broker


@pytest.fixture
async def bus(broker: EmbeddedBroker) -> AsyncIterator[Bus]:
    """A server's connection, with the streams in place and empty."""
    async with await connect(broker.url, broker.credentials, name="test-server") as bus:
        await ensure_streams(bus)
        for stream in ("TINKER_OPS", "TINKER_RESULTS", "TINKER_SUBMIT"):
            await bus.js.purge_stream(stream)
        yield bus


@pytest.fixture
async def tenant(broker: EmbeddedBroker, bus: Bus) -> AsyncIterator[Client]:
    """The tenant `demo` on plain nats-py, with nothing set but user and password."""

    async def quiet(_: Exception) -> None:
        return

    client = await nats.connect(broker.url, user="demo", password="demo-password", error_cb=quiet)
    client._skip_subject_validation = True
    yield client
    await client.close()


@pytest.fixture
async def stored(bus: Bus) -> None:
    """One result of each tenant."""
    for tenant in ("demo", "other"):
        result = Result(
            request_id="m#1", model_id="m", seq_id=1, outcome=OptimStepDone(metrics={tenant: 1.0})
        )
        await Results(bus).publish(tenant, result)


async def messages(bus: Bus) -> dict[str, int]:
    return {
        name: (await bus.js.stream_info(f"TINKER_{name}")).state.messages
        for name in ("OPS", "RESULTS", "SUBMIT")
    }


async def answer(tenant: Client, subject: str, body: bytes = b"") -> bytes | None:
    """What comes back, or None where nothing does."""
    try:
        msg = await tenant.request(subject, body, timeout=0.15)
    except (nats.errors.TimeoutError, nats.errors.NoRespondersError):
        return None
    return None if (msg.headers or {}).get("Status") else bytes(msg.data)


async def test_a_tenant_publishes_operations_with_an_acknowledgement(tenant: Client, bus: Bus) -> None:
    ack = await tenant.jetstream().publish("tinker.v1.submit.demo.my-model", b"x")
    assert ack.stream == "TINKER_SUBMIT"
    assert (await bus.js.get_msg("TINKER_SUBMIT", ack.seq)).subject == "tinker.v1.submit.demo.my-model"


async def test_a_tenant_reads_its_stored_and_its_live_results(tenant: Client, bus: Bus) -> None:
    live = await tenant.subscribe("tinker.v1.results.demo.>")
    one_model = await tenant.subscribe("tinker.v1.results.demo.m.*")
    await tenant.flush()
    result = Result(request_id="m#1", model_id="m", seq_id=1, outcome=OptimStepDone(metrics={}))
    await Results(bus).publish("demo", result)
    body = (await live.next_msg(2)).data
    assert (await one_model.next_msg(2)).data == body
    assert await answer(tenant, f"{GET}.tinker.v1.results.demo.m.1") == body


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize(
    ("subject", "body"),
    [
        ("tinker.v1.submit.other.m", b"x"),
        ("tinker.v1.submit.demo", b"x"),
        ("tinker.v1.submit.demo.m.extra", b"x"),
        ("tinker.v1.submit.*.m", b"x"),
        ("tinker.v1.results.demo.m.2", b"x"),
        ("tinker.v1.results.other.m.2", b"x"),
        ("tinker.v1.ops.default.m.1", b"x"),
        ("tinker.v1.metrics.p", b"x"),
        ("tinker.v1.stored.ops.default.m.1", b"x"),
        (f"{GET}.tinker.v1.results.other.m.1", b""),
        (f"{GET}.tinker.v1.results.*.m.1", b""),
        (f"{GET}.tinker.v1.results.>", b""),
        (GET, b'{"seq":2}'),
        (GET, b'{"last_by_subj":"tinker.v1.results.other.m.1"}'),
        (GET, b'{"seq":1,"next_by_subj":"tinker.v1.results.>","batch":10}'),
        ("$JS.API.DIRECT.GET.TINKER_OPS.tinker.v1.ops.default.m.1", b""),
        ("$JS.API.DIRECT.GET.KV_tinker_models.$KV.tinker_models.m", b""),
        ("$JS.API.STREAM.MSG.GET.TINKER_RESULTS", b'{"seq":2}'),
        ("$JS.API.INFO", b""),
        ("$JS.API.STREAM.LIST", b""),
        ("$JS.API.STREAM.NAMES", b""),
        ("$JS.API.STREAM.INFO.TINKER_OPS", b""),
        ("$JS.API.STREAM.PURGE.TINKER_OPS", b""),
        ("$JS.API.STREAM.DELETE.TINKER_RESULTS", b""),
        ("$JS.API.STREAM.UPDATE.TINKER_OPS", b"{}"),
        ("$JS.API.STREAM.CREATE.MINE", b'{"name":"MINE","subjects":["tinker.v1.>"]}'),
        ("$JS.API.CONSUMER.CREATE.TINKER_RESULTS", b'{"stream_name":"TINKER_RESULTS","config":{}}'),
        ("$JS.API.CONSUMER.MSG.NEXT.TINKER_SUBMIT.intake", b""),
        ("$JS.ACK.TINKER_SUBMIT.intake.1.1.1.1.0", b"+ACK"),
        ("$KV.tinker_models.m", b"x"),
        ("$SYS.REQ.SERVER.PING", b""),
        ("$SYS.REQ.ACCOUNT.TINKERBUS.CONNZ", b""),
        ("$SYS.REQ.USER.INFO", b""),
    ],
)
async def test_everything_else_is_closed(tenant: Client, bus: Bus, subject: str, body: bytes) -> None:
    before = await messages(bus)
    assert await answer(tenant, subject, body) is None
    assert await messages(bus) == before
    assert [info.config.name for info in await bus.js.streams_info()] == [
        "TINKER_BLOBS",
        "TINKER_OPS",
        "TINKER_RESULTS",
        "TINKER_SUBMIT",
    ]


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize(
    "request_body",
    [
        {"seq": 2},
        {"last_by_subj": "tinker.v1.results.other.m.1"},
        {"seq": 1, "next_by_subj": "tinker.v1.results.other.>"},
        {"batch": 10, "seq": 1},
        {"multi_last": ["tinker.v1.results.>"], "batch": 10},
    ],
)
async def test_the_body_of_an_allowed_get_cannot_ask_for_more(tenant: Client, request_body: object) -> None:
    inbox = tenant.new_inbox()
    replies = await tenant.subscribe(inbox)
    subject = f"{GET}.tinker.v1.results.demo.m.1"
    await tenant.publish(subject, json.dumps(request_body).encode(), reply=inbox)
    seen = b""
    while True:
        try:
            seen += (await replies.next_msg(0.15)).data
        except nats.errors.TimeoutError:
            break
    assert b"other" not in seen


@pytest.mark.parametrize(
    "subject",
    [
        ">",
        "tinker.>",
        "tinker.v1.results.>",
        "tinker.v1.results.*.m.1",
        "tinker.v1.results.other.>",
        "tinker.v1.submit.other.>",
        "tinker.v1.submit.demo.>",
        "tinker.v1.ops.>",
        "tinker.v1.stored.>",
        "tinker.v1.metrics.>",
        "$KV.>",
        "$JS.>",
        "$SYS.>",
        "_R_.>",
    ],
)
async def test_nothing_but_own_results_can_be_listened_to(tenant: Client, bus: Bus, subject: str) -> None:
    heard: list[str] = []

    async def hear(msg: nats.aio.msg.Msg) -> None:
        heard.append(msg.subject)

    await tenant.subscribe(subject, cb=hear)
    await tenant.flush()
    await bus.js.publish("tinker.v1.ops.default.m.1", b"x")
    await bus.js.publish("tinker.v1.submit.demo.m", b"x")
    await bus.js.publish("tinker.v1.submit.other.m", b"x")
    await bus.js.publish("tinker.v1.results.other.m.1", b"x")
    await bus.nc.publish("tinker.v1.metrics.p", b"x")
    await tenant.flush()
    await asyncio.sleep(0.02)
    assert heard == []


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize(
    "forged",
    [
        "tinker.v1.ops.default.m.1",
        "tinker.v1.results.other.m.7",
        "tinker.v1.submit.other.m",
        "$KV.tinker_models.m",
        "$JS.API.STREAM.PURGE.TINKER_RESULTS",
        "$JS.API.STREAM.DELETE.TINKER_SUBMIT",
    ],
)
async def test_a_forged_reply_subject_writes_nowhere(tenant: Client, bus: Bus, forged: str) -> None:
    """JetStream answers to the reply subject: in one shared account that answer would land on it."""
    before = await messages(bus)
    await tenant.publish("tinker.v1.submit.demo.m", b"x", reply=forged)
    await tenant.publish(f"{GET}.tinker.v1.results.demo.m.1", b"", reply=forged)
    await tenant.flush()
    await asyncio.sleep(0.05)
    after = await messages(bus)
    assert after == {**before, "SUBMIT": after["SUBMIT"]}
    subjects = (await bus.js.stream_info("TINKER_SUBMIT", subjects_filter=">")).state.subjects
    assert not subjects or list(subjects) == ["tinker.v1.submit.demo.m"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Nats-Rollup": "all"},
        {"Nats-TTL": "1"},
        {"Nats-Trace-Dest": "tinker.v1.ops.default.m.1"},
        {"Nats-Schedule": "@at 2030-01-01T00:00:00Z", "Nats-Schedule-Target": "tinker.v1.submit.other.m"},
    ],
)
async def test_headers_that_command_the_broker_do_no_harm(
    tenant: Client, bus: Bus, headers: dict[str, str]
) -> None:
    await bus.js.publish("tinker.v1.submit.other.m", b"x")
    await tenant.publish("tinker.v1.submit.demo.m", b"y", headers=headers)
    await tenant.flush()
    await asyncio.sleep(0.05)
    assert (await messages(bus))["OPS"] == 0
    subjects = (await bus.js.stream_info("TINKER_SUBMIT", subjects_filter=">")).state.subjects
    assert subjects is not None
    assert subjects["tinker.v1.submit.other.m"] == 1


async def test_one_tenants_message_ids_cannot_swallow_anothers_messages(tenant: Client, bus: Bus) -> None:
    await tenant.publish("tinker.v1.submit.demo.m", b"x", headers={"Nats-Msg-Id": "guess"})
    await tenant.flush()
    await asyncio.sleep(0.3)
    ack = await bus.js.publish("tinker.v1.submit.other.m", b"y", headers={"Nats-Msg-Id": "guess"})
    assert not ack.duplicate
