"""Every operation sent again: at once, later, after its entry was trimmed, after a restart, over HTTP and NATS.

It has the same request id and the same result, and it counts once: the step behind it has the gradient norm of a
model that was sent everything once. The broker's own window for duplicates is one second here, so that nothing
after that is its doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Literal

import httpx
import msgspec
import pytest

from bus import subjects
from bus.broker_config import SERVER_USER
from bus.connection import Bus, Credentials, connect
from bus.events import AdamParams, CreateModel, ForwardBackward, LoraConfig, Op, OptimStep, UnloadModel
from bus.log import OpsLog
from runtime.config import DEFAULT_TENANT
from tests.support.by_hand import OverHttp, OverNats, Refused, Sender, Sent, batch
from tests.support.service import Service, free_port, left_over

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

BROKERS_WINDOW_S = 1.0
LATER_S = 3.0
COPIES = 3

CREATE = CreateModel(base_model="tiny", lora=LoraConfig(rank=8, seed=3))
STEP = OptimStep(adam_params=AdamParams(learning_rate=1e-3))
SCORED = batch((4, 6), seed=100, forward_only=True)

Way = Literal["http", "nats", "nats with message ids"]
WAYS: tuple[Way, ...] = ("http", "nats")


def trained_on(seed: int) -> ForwardBackward:
    return batch((7, 3, 11), seed)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Takes a snapshot, and trims behind it, after every tenth of a second of work."""
    folder = tmp_path_factory.mktemp("duplicates")
    config = folder / "tinkerbus.toml"
    config.write_text("[recovery]\nreplay_budget_s = 0.1\n")
    service = Service(folder / "data", ("--config", str(config)), port=free_port())
    try:
        yield service.start()
    finally:
        service.stop()


@dataclass(frozen=True)
class Connected:
    """The ways into one service, and the servers' own view of its broker."""

    ways: dict[Way, Sender]
    over_nats: dict[Way, OverNats]
    bus: Bus
    log: OpsLog

    async def new_model(self, way: Way) -> Sent:
        sender = self.ways[way]
        return Sent(sender, await sender.new_model())

    async def queue_is_empty(self) -> None:
        """What was published, copies too, has been taken from the submit queue."""
        async with asyncio.timeout(60):
            while (await self.bus.js.stream_info(subjects.SUBMIT_STREAM)).state.messages:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def has_one_message_each(self, sent: Sent) -> None:
        """Each operation has one result, and stands on the log once, or has been trimmed."""
        results = subjects.results_of(DEFAULT_TENANT, sent.model_id)
        ops = subjects.ops("main", sent.model_id, None).removesuffix(subjects.END) + "*"
        for stream, pattern in ((subjects.RESULTS_STREAM, results), (subjects.OPS_STREAM, ops)):
            info = await self.bus.js.stream_info(stream, subjects_filter=pattern)
            counts = info.state.subjects or {}
            assert set(counts.values()) <= {1}, counts
            if stream == subjects.RESULTS_STREAM:
                assert subjects.numbers(counts) == set(sent.answers)

    async def trimmed(self, sent: Sent, seq_id: int) -> None:
        """Score something until snapshots stand behind operation `seq_id`, and the log has it no more."""
        deadline = time.monotonic() + 60
        while seq_id in await self.log.numbers(sent.model_id):
            assert time.monotonic() < deadline, "the log is not trimmed"
            await sent.send(SCORED)


@contextlib.asynccontextmanager
async def connected(service: Service) -> AsyncIterator[Connected]:
    """With the broker's window for duplicates set; a server that starts puts its own back."""
    password = (service.data / "nats" / "server.password").read_text().strip()
    async with contextlib.AsyncExitStack() as stack:
        bus = await stack.enter_async_context(
            await connect(service.nats, Credentials(SERVER_USER, password), name="test")
        )
        for stream in (subjects.SUBMIT_STREAM, subjects.OPS_STREAM, subjects.RESULTS_STREAM):
            config = (await bus.js.stream_info(stream)).config
            config.duplicate_window = BROKERS_WINDOW_S
            assert (await bus.js.update_stream(config)).config.duplicate_window == BROKERS_WINDOW_S
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=service.http, headers={"x-api-key": service.api_key})
        )
        tenant = await stack.enter_async_context(
            await connect(
                service.nats,
                Credentials(DEFAULT_TENANT, service.nats_password),
                name="tenant",
                uses_jetstream=False,
            )
        )
        over_nats: dict[Way, OverNats] = {
            "nats": OverNats(tenant, DEFAULT_TENANT),
            "nats with message ids": OverNats(tenant, DEFAULT_TENANT, message_ids=True),
        }
        for way in over_nats.values():
            stack.push_async_callback(way.close)
        yield Connected({"http": OverHttp(http), **over_nats}, over_nats, bus, OpsLog(bus, "main"))


async def window(sent: Sent, seed: int, copies: int = 1) -> None:
    """A forward and a forward_backward."""
    await sent.send(SCORED, copies)
    await sent.send(trained_on(seed), copies)


async def other_bodies_are_refused(sent: Sent) -> None:
    """Another body under a number that is taken changes nothing. Over HTTP its sender is told so; over NATS, where a
    number has one answer, it gets that."""
    for seq_id, (op, first) in sent.answers.items():
        if seq_id is None:
            continue  # there is nothing to say differently
        asked = sent.sender.ask(sent.model_id, seq_id, another(op))
        if sent.sender.says_so:
            taken = f"another body was already accepted for seq_id {seq_id} of model_id {sent.model_id!r}"
            with pytest.raises(Refused, match=re.escape(taken)):
                await asked
        else:
            assert await asked == first, (seq_id, op)


def another(op: Op) -> Op:
    match op:
        case CreateModel():
            return msgspec.structs.replace(op, lora=LoraConfig(rank=4, seed=3))
        case ForwardBackward(data=data):
            return msgspec.structs.replace(op, data=(*data, data[0]))
        case _:
            return OptimStep(adam_params=AdamParams(learning_rate=0.5))


async def steps_as(sent: Sent, reference: Sent, step: int, copies: int = 1) -> None:
    """Of the window, a step: the same bits as that of the model that was sent everything once."""
    found, wanted = (await sent.send(STEP, copies)).metrics, (await reference.send(STEP)).metrics
    assert found == wanted
    assert (found["step"], found["window_calls"], found["window_tokens"]) == (step, 1, 7 + 3 + 11)
    assert found["grad_norm"] > 0


@pytest.mark.parametrize("way", [*WAYS, "nats with message ids"])
async def test_what_is_sent_again_at_once_counts_once(service: Service, way: Way) -> None:
    async with connected(service) as at:
        sent, reference = await at.new_model(way), await at.new_model(way)
        await sent.send(CREATE, COPIES)
        await reference.send(CREATE)
        for step in (1, 2):
            await window(sent, seed=step, copies=COPIES)
            await window(reference, seed=step)
            await sent.send_all_again()
            await other_bodies_are_refused(sent)
            await at.queue_is_empty()
            await steps_as(sent, reference, step, COPIES)
            await sent.send_all_again()
        await sent.send(UnloadModel(), COPIES)
        await sent.send_all_again()
        await at.queue_is_empty()
        await at.has_one_message_each(sent)
        if way != "http":
            assert (at.over_nats[way].left_out > 0) == (way == "nats with message ids")


@pytest.mark.parametrize("way", [*WAYS, "nats with message ids"])
async def test_what_is_sent_again_after_three_seconds_counts_once(service: Service, way: Way) -> None:
    async with connected(service) as at:
        sent, reference = await at.new_model(way), await at.new_model(way)
        for each in (sent, reference):
            await each.send(CREATE)
            await window(each, seed=1)
        await asyncio.sleep(LATER_S)
        await sent.send_all_again()
        await at.queue_is_empty()
        await steps_as(sent, reference, 1)
        for each in (sent, reference):
            await window(each, seed=2)
        ended = await at.new_model(way)
        await ended.send(CREATE)
        await ended.send(UnloadModel())
        await asyncio.sleep(LATER_S)
        await sent.send_all_again()
        await ended.send_all_again()
        await other_bodies_are_refused(sent)
        await at.queue_is_empty()
        await steps_as(sent, reference, 2)
        for each in (sent, ended):
            await at.has_one_message_each(each)
        if way != "http":
            assert at.over_nats[way].left_out == 0


@pytest.mark.parametrize("way", WAYS)
async def test_what_is_sent_again_after_the_log_was_trimmed_counts_once(service: Service, way: Way) -> None:
    async with connected(service) as at:
        sent, reference = await at.new_model(way), await at.new_model(way)
        for each in (sent, reference):
            await each.send(CREATE)
        for step in (1, 2):
            for each in (sent, reference):
                await window(each, seed=step)
            inside = sent.next_seq_id - 1
            await at.trimmed(sent, inside)
            await sent.send_all_again()
            await other_bodies_are_refused(sent)
            await at.queue_is_empty()
            assert not await at.log.numbers(sent.model_id) & set(range(inside + 1))
            await steps_as(sent, reference, step)
        await at.trimmed(sent, sent.next_seq_id - 1)  # behind the step
        await sent.send(UnloadModel())
        await sent.send_all_again()
        await at.queue_is_empty()
        await at.has_one_message_each(sent)


async def test_what_is_sent_again_after_a_kill_and_a_restart_counts_once(service: Service) -> None:
    async with connected(service) as at:
        live, ended = {way: await at.new_model(way) for way in WAYS}, {}
        for way, sent in live.items():
            ended[way] = await at.new_model(way)
            for each in (sent, ended[way]):
                await each.send(CREATE)
                await window(each, seed=1)
                await each.send(STEP)
            await ended[way].send(UnloadModel())
            await window(sent, seed=2)
    tree = service.kill_tree()
    assert left_over(tree) == []
    service.start()
    async with connected(service) as at:
        for way in WAYS:
            for sent in (live[way], ended[way]):
                sent.sender = at.ways[way]
                await sent.send_all_again()
                await other_bodies_are_refused(sent)
            await at.queue_is_empty()
            reference = await at.new_model(way)
            await reference.send(CREATE)
            await window(reference, seed=1)
            await reference.send(STEP)
            await window(reference, seed=2)
            await steps_as(live[way], reference, 2, COPIES)
            for sent in (live[way], ended[way]):
                await sent.send_all_again()
                await at.queue_is_empty()
                await at.has_one_message_each(sent)
