from __future__ import annotations

import asyncio
import hashlib
from functools import partial

import pytest

from bus import log, tail
from bus.codec import JSON, MSGPACK, encode
from bus.connection import BrokerUnreachable, Bus
from bus.embedded import EmbeddedBroker
from bus.errors import NewerFormat
from bus.events import AdamParams, OptimStep, UnloadModel
from bus.ledger import Ledger
from bus.log import Appended, BodyConflict, LogEntry, LogFull, OpsLog
from bus.streams import ensure_streams
from tests.bus.proxy import Proxy
from tests.bus.waiting import until


def step(seq_id: int | None, *, model_id: str = "run:train:0", learning_rate: float = 1e-4) -> LogEntry:
    op = OptimStep(adam_params=AdamParams(learning_rate=learning_rate))
    return log.entry("demo", model_id, seq_id, "optim_step", encode(op))


async def take(ops: OpsLog, count: int, from_position: int = 1) -> list[LogEntry]:
    found = []
    async with asyncio.timeout(20):
        async for entry in ops.read(from_position):
            found.append(entry)
            if len(found) == count:
                return found
    raise AssertionError("the log ended")


@pytest.fixture
def ops(bus: Bus) -> OpsLog:
    return OpsLog(bus, "default")


async def test_an_entry_comes_back_as_it_was_appended(ops: OpsLog) -> None:
    entry = step(4)
    assert await ops.append(entry) == Appended(1, duplicate=False)
    found = await ops.get("run:train:0", 4)
    assert found is not None
    assert (found.tenant, found.model_id, found.seq_id, found.verb) == (
        "demo",
        "run:train:0",
        4,
        "optim_step",
    )
    assert (found.body, found.content_type, found.position) == (entry.body, MSGPACK, 1)
    assert found.body_hash == hashlib.blake2b(entry.body, digest_size=16).hexdigest()
    assert found.request_id == "run:train:0#4"
    assert found.op() == OptimStep()
    assert await ops.get("run:train:0", 5) is None
    assert await ops.last_position() == 1


async def test_unload_has_no_number_and_an_identity_all_the_same(ops: OpsLog) -> None:
    entry = log.entry("demo", "m", None, "unload_model", encode(UnloadModel()))
    await ops.append(entry)
    assert (await ops.append(entry)).duplicate
    (found,) = await take(ops, 1)
    assert found.seq_id is None
    assert found.request_id == "m#end"


async def test_the_same_body_again_is_a_duplicate_at_the_first_place(ops: OpsLog) -> None:
    await ops.append(step(1))
    await ops.append(step(2))
    assert await ops.append(step(1)) == Appended(1, duplicate=True)
    assert await ops.last_position() == 2


async def test_another_body_is_refused_and_names_the_operation(ops: OpsLog) -> None:
    await ops.append(step(1))
    with pytest.raises(BodyConflict, match="run:train:0#1 is already on the log with another body") as caught:
        await ops.append(step(1, learning_rate=1.0))
    assert caught.value.existing.body == step(1).body


async def test_of_two_writers_exactly_one_wins(ops: OpsLog, second_bus: Bus) -> None:
    other = OpsLog(second_bus, "default")
    for seq_id in range(1, 31):
        answers = await asyncio.gather(
            ops.append(step(seq_id)),
            other.append(step(seq_id, learning_rate=seq_id)),
            return_exceptions=True,
        )
        assert sorted(type(a).__name__ for a in answers) == ["Appended", "BodyConflict"]
    assert await ops.last_position() == 30


async def test_of_two_writers_of_one_body_both_learn_the_same_place(ops: OpsLog, second_bus: Bus) -> None:
    one, two = await asyncio.gather(ops.append(step(1)), OpsLog(second_bus, "default").append(step(1)))
    assert one.position == two.position == 1
    assert sorted([one.duplicate, two.duplicate]) == [False, True]


async def test_a_retry_after_a_lost_answer_is_a_duplicate(ops: OpsLog, frail_bus: Bus, proxy: Proxy) -> None:
    proxy.muted = True
    append = asyncio.create_task(OpsLog(frail_bus, "default").append(step(1)))
    await until(ops.last_position)
    proxy.muted = False
    proxy.cut()
    assert await append == Appended(1, duplicate=True)
    assert await ops.last_position() == 1


async def test_an_append_while_the_broker_is_away_is_answered_once_it_is_back(
    broker: EmbeddedBroker, ops: OpsLog
) -> None:
    restart = asyncio.create_task(asyncio.to_thread(broker.restart, kill=True, down_s=0.5))
    await asyncio.sleep(0.1)
    assert await ops.append(step(1)) in (Appended(1, duplicate=False), Appended(1, duplicate=True))
    await restart


async def test_an_append_without_any_answer_says_so_in_time(frail_bus: Bus, proxy: Proxy) -> None:
    proxy.muted = True
    with pytest.raises(BrokerUnreachable, match="operation run:train:0#1"):
        await OpsLog(frail_bus, "default").append(step(1), timeout_s=0.3)


async def _is_read(ops: OpsLog) -> bool:
    return not await ops.has_more()


async def test_a_reader_knows_that_nothing_stands_behind_it_though_the_last_entries_are_gone(
    bus: Bus, ops: OpsLog
) -> None:
    for seq_id in (1, 2, 3):
        await ops.append(step(seq_id))
    assert await ops.has_more()
    await ops.drop(step(1).model_id)
    assert await ops.last_position() == 3
    assert not await ops.has_more()
    await ops.append(step(4))
    await bus.js.publish(f"tinker.v1.ops.{ops.group}.x.9", b"none of ours")
    reading = ops.read()
    assert (await anext(reading)).seq_id == 4
    assert ops.read_to == 0  # whoever asked for it may still be at it
    waiting = asyncio.ensure_future(anext(reading))
    await until(partial(_is_read, ops))
    assert (ops.read_to, ops.skipped) == (5, 1)
    waiting.cancel()


async def test_a_full_log_refuses_and_keeps_what_it_has(bus: Bus, ops: OpsLog) -> None:
    await ensure_streams(bus, ops_max_bytes=4096)
    with pytest.raises(LogFull, match="maximum bytes exceeded"):
        await asyncio.gather(*(ops.append(step(seq_id)) for seq_id in range(1, 100)))
    stored = await ops.last_position()
    assert stored > 3
    assert [entry.seq_id for entry in await take(ops, stored)] == list(range(1, stored + 1))
    await ensure_streams(bus)
    assert not (await ops.append(step(stored + 1))).duplicate


async def test_a_5_mb_body_stands_on_the_log_itself(ops: OpsLog) -> None:
    body = bytes(range(250)) * 20_000
    await ops.append(log.entry("demo", "m", 1, "forward_backward", body))
    (found,) = await take(ops, 1)
    assert (found.body, found.blob, found.size) == (body, None, 5_000_000)


async def test_names_of_any_characters_come_back(ops: OpsLog) -> None:
    await ops.append(log.entry(" Größe,\r\n大 ", " 模.型>", 1, "optim_step", encode(OptimStep(), JSON), JSON))
    (found,) = await take(ops, 1)
    assert (found.tenant, found.model_id, found.op()) == (" Größe,\r\n大 ", " 模.型>", OptimStep())


# ----------------------------------------------------------------------------------------------------- reading


async def test_the_log_is_read_from_any_position_in_order_and_goes_on_with_what_comes(ops: OpsLog) -> None:
    for seq_id in range(1, 6):
        await ops.append(step(seq_id))
    reading = asyncio.create_task(take(ops, 150, from_position=3))
    for seq_id in range(6, 153):
        await ops.append(step(seq_id))
    entries = await reading
    assert [entry.position for entry in entries] == list(range(3, 153))
    assert [entry.seq_id for entry in entries] == list(range(3, 153))


async def test_a_new_entry_is_seen_at_once(
    ops: OpsLog, second_bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "_POLL_S", 100.0)
    reading = asyncio.create_task(take(ops, 1))
    await asyncio.sleep(0.1)
    await OpsLog(second_bus, "default").append(step(1))
    async with asyncio.timeout(30):
        await reading


async def test_a_group_sees_its_own_entries_alone(bus: Bus, ops: OpsLog) -> None:
    await OpsLog(bus, "another").append(step(1))
    await ops.append(step(2))
    assert [entry.seq_id for entry in await take(ops, 1)] == [2]


async def test_reading_goes_on_over_restarts_of_the_broker(broker: EmbeddedBroker, ops: OpsLog) -> None:
    reading = asyncio.create_task(take(ops, 6))
    for round_, kill in enumerate((False, True)):
        await ops.append(step(3 * round_ + 1))
        await ops.append(step(3 * round_ + 2))
        await asyncio.to_thread(broker.restart, kill=kill)
        await ops.append(step(3 * round_ + 3))
    assert [entry.seq_id for entry in await reading] == [1, 2, 3, 4, 5, 6]


async def test_reading_goes_on_when_the_broker_fell_silent(ops: OpsLog, frail_bus: Bus, proxy: Proxy) -> None:
    frail = OpsLog(frail_bus, "default")
    reading = asyncio.create_task(take(frail, 2))
    await ops.append(step(1))
    await asyncio.sleep(0.2)
    proxy.muted = True  # the announcement of the next entry is lost, and so are answers
    await ops.append(step(2))
    await asyncio.sleep(0.2)
    proxy.muted = False
    assert [entry.seq_id for entry in await reading] == [1, 2]


async def test_foreign_messages_are_skipped_and_counted(bus: Bus, ops: OpsLog) -> None:
    await bus.js.publish("tinker.v1.ops.default.m.1", b"hello")
    await bus.js.publish("tinker.v1.ops.default.m.x", b"hello", headers={"Tb-Tenant": "demo"})
    await ops.append(step(2))
    assert [entry.seq_id for entry in await take(ops, 1)] == [2]
    assert ops.skipped == 2


async def test_an_entry_of_a_newer_format_stops_the_reader_by_name(bus: Bus, ops: OpsLog) -> None:
    headers = {"Content-Type": MSGPACK, "Tb-Format": "2", "Tb-Tenant": "t", "Tb-Verb": "v", "Tb-Hash": "h"}
    await bus.js.publish("tinker.v1.ops.default.m.1", b"?", headers=headers)
    with pytest.raises(NewerFormat, match="format 2"):
        await take(ops, 1)


async def test_a_trimmed_log_is_read_from_what_is_left(bus: Bus, ops: OpsLog) -> None:
    for seq_id in range(1, 6):
        await ops.append(step(seq_id))
    await bus.js.purge_stream("TINKER_OPS", seq=4)
    assert [entry.position for entry in await take(ops, 2)] == [4, 5]


async def test_a_reader_that_stops_leaves_nothing_behind(bus: Bus, ops: OpsLog) -> None:
    await ops.append(step(1))
    before = len(bus.nc._subs)
    reader = ops.read()
    await anext(reader)
    await reader.aclose()
    assert len(bus.nc._subs) == before
    assert bus.on_reconnect == []
    assert (await bus.js.stream_info("TINKER_OPS")).state.consumer_count == 0


async def test_a_reader_on_a_closed_connection_says_so(ops: OpsLog, bus: Bus) -> None:
    reading = asyncio.create_task(take(ops, 1))
    await asyncio.sleep(0.05)
    await bus.close()
    with pytest.raises(BrokerUnreachable):
        await reading


async def test_what_was_trimmed_is_known_by_the_ledger_and_not_stored_again(bus: Bus) -> None:
    ledger = await Ledger.open(bus, "default")
    ops = OpsLog(bus, "default", ledger)
    entries = [step(seq_id) for seq_id in range(4)]
    for one in entries:
        position = (await ops.append(one)).position
        await ledger.record(one.model_id, one.seq_id, one.body_hash, "done", position)
    await ops.append(step(0, model_id="other"))
    await ops.trim("run:train:0", 3, 2)
    assert await ops.get("run:train:0", 1) is None
    assert [entry.seq_id for entry in await take(ops, 3)] == [2, 3, 0]
    assert await ops.append(entries[1], trimmed_below=2) == Appended(2, duplicate=True)
    with pytest.raises(BodyConflict, match="run:train:0#1"):
        await ops.append(step(1, learning_rate=5.0), trimmed_below=2)
    # Below the mark and not in the ledger: a number that never came, as one behind a gap.
    assert not (await ops.append(step(1, model_id="third"), trimmed_below=2)).duplicate


# ------------------------------------------------------------------------------------------------- one model of many


async def test_one_model_is_read_apart_from_the_others(ops: OpsLog) -> None:
    for seq_id in (1, 2):
        for model_id in ("a.1", "b"):
            await ops.append(step(seq_id, model_id=model_id))
    reader = ops.read(2, model_id="a.1")
    assert (await anext(reader)).position == 3
    await ops.append(step(3, model_id="b"))
    await ops.append(step(3, model_id="a.1"))
    entry = await anext(reader)
    assert (entry.model_id, entry.seq_id, entry.position) == ("a.1", 3, 6)
    await reader.aclose()


async def test_what_is_there_now_comes_to_an_end(bus: Bus, ops: OpsLog) -> None:
    assert [entry async for entry in ops.so_far()] == []
    for seq_id in range(1, 71):  # more than a batch
        await ops.append(step(seq_id, model_id="a"))
    await OpsLog(bus, "another").append(step(1))
    await ops.append(log.entry("demo", "b", None, "unload_model", encode(UnloadModel())))
    assert [entry.position async for entry in ops.so_far()] == [*range(1, 71), 72]
    assert [entry.seq_id async for entry in ops.so_far(model_id="b")] == [None]


async def test_the_numbers_of_a_model_are_known_without_reading_it(bus: Bus, ops: OpsLog) -> None:
    for seq_id in (2, 10):
        await ops.append(step(seq_id))
    await ops.append(log.entry("demo", "run:train:0", None, "unload_model", encode(UnloadModel())))
    await OpsLog(bus, "another").append(step(3))
    await bus.js.publish("tinker.v1.ops.default.run=3Atrain=3A0.x", b"hello")
    assert await ops.numbers("run:train:0") == {2, 10, None}
    assert await ops.numbers("nobody") == set()
    assert await ops.models() == {"run:train:0"}
