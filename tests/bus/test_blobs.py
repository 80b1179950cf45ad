"""Bodies above one message, on a broker that takes 1 MiB in one, as brokers do unless told otherwise."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bus import log, subjects
from bus.backlog import Backlog, Load
from bus.blobs import BlobLost, BlobRef
from bus.connection import BrokerUnreachable, Bus
from bus.embedded import EmbeddedBroker
from bus.events import ForwardBackwardDone, Result, Tensor
from bus.log import BodyConflict, LogEntry, OpsLog
from bus.results import Published, Results
from bus.streams import ensure_streams
from bus.tables import Tables
from tests.bus.conftest import TENANTS, UNSYNCED
from tests.bus.waiting import until

BODY = bytes(range(251)) * 12_000
"""3 MB, every piece another."""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path, TENANTS, sync_interval=UNSYNCED, max_payload=2**20) as broker:
        yield broker


@pytest.fixture
async def ops(bus: Bus) -> OpsLog:
    assert bus.max_payload == 2**20
    return OpsLog(bus, "g")


def large(seq_id: int, body: bytes = BODY, model_id: str = "run:1") -> LogEntry:
    return log.entry("demo", model_id, seq_id, "forward_backward", body)


async def pieces(bus: Bus) -> int:
    return int((await bus.js.stream_info(subjects.BLOB_STREAM)).state.messages)


async def read(ops: OpsLog, count: int) -> list[LogEntry]:
    found = []
    async with asyncio.timeout(20):
        async for entry in ops.read():
            found.append(entry)
            if len(found) == count:
                return found
    raise AssertionError("the log ended")


async def test_a_body_above_one_message_is_on_the_log_as_a_reference_and_comes_back_equal(
    bus: Bus, ops: OpsLog
) -> None:
    await ops.append(large(1))
    await ops.append(large(2, b"small"))
    first, second = await read(ops, 2)
    assert (first.body, first.size, first.body_hash) == (b"", len(BODY), large(1).body_hash)
    assert (second.body, second.blob) == (b"small", None)
    assert await ops.whole(first) == replace(large(1), position=1)
    assert await ops.whole(second) == second
    assert bus.connected
    assert list(bus.errors) == []


async def test_the_same_large_body_again_is_a_duplicate_and_is_stored_once(bus: Bus, ops: OpsLog) -> None:
    first = await ops.append(large(1))
    assert await pieces(bus) == 3
    again = await ops.append(large(1))
    assert (again.position, again.duplicate) == (first.position, True)
    assert await pieces(bus) == 3


async def test_of_two_large_bodies_under_one_number_one_wins_and_the_other_leaves_nothing(
    bus: Bus, second_bus: Bus, ops: OpsLog
) -> None:
    other = OpsLog(second_bus, "g")
    answers = await asyncio.gather(
        ops.append(large(1)), other.append(large(1, BODY[::-1])), return_exceptions=True
    )
    assert sorted(type(answer).__name__ for answer in answers) == ["Appended", "BodyConflict"]
    (entry,) = await read(ops, 1)
    assert (await ops.whole(entry)).body in (BODY, BODY[::-1])
    assert await pieces(bus) == 3
    with pytest.raises(BodyConflict):
        await ops.append(large(1, b"small"))
    with pytest.raises(BodyConflict):
        await ops.append(large(1, BODY + b"x"))
    assert await pieces(bus) == 3


async def test_two_writers_of_one_large_body_store_it_once(bus: Bus, second_bus: Bus, ops: OpsLog) -> None:
    one, two = await asyncio.gather(ops.append(large(1)), OpsLog(second_bus, "g").append(large(1)))
    assert sorted([one.duplicate, two.duplicate]) == [False, True]
    (entry,) = await read(ops, 1)
    assert (await ops.whole(entry)).body == BODY
    assert await pieces(bus) == 3


async def test_a_body_that_is_not_whole_is_an_error_with_what_is_there(bus: Bus, ops: OpsLog) -> None:
    await ops.append(large(1))
    (entry,) = await read(ops, 1)
    await bus.js.purge_stream(
        subjects.BLOB_STREAM, subject=f"{subjects.blob('g', 'run:1', 1)}.{entry.blob}.1"
    )
    with pytest.raises(BlobLost, match="the body of run:1#1 had 3012000 bytes; piece 2 of 3 is not there"):
        await ops.whole(entry)


async def test_a_body_that_is_not_what_was_stored_is_an_error(bus: Bus, ops: OpsLog) -> None:
    await ops.append(large(1))
    (entry,) = await read(ops, 1)
    await bus.js.publish(f"{subjects.blob('g', 'run:1', 1)}.{entry.blob}.0", BODY[:100])
    with pytest.raises(BlobLost, match="the body of run:1#1 had 3012000 bytes with hash"):
        await ops.whole(entry)


async def test_what_a_model_stored_goes_with_it_and_another_models_stays(bus: Bus, ops: OpsLog) -> None:
    for model_id in ("run:1", "run:2", "run:3"):
        await ops.append(large(1, model_id=model_id))
    await ops.forget("run:1")
    await ops.forget("run:1")
    assert await pieces(bus) == 6
    await ops.forget_all({"run:1", "run:2", "never"})
    assert await pieces(bus) == 3
    entries = await read(ops, 3)
    assert (await ops.whole(entries[2])).body == BODY
    assert await OpsLog(bus, "another").forget_all({"run:3"}) is None
    assert await pieces(bus) == 3


async def test_a_large_body_outlives_a_kill_of_the_broker(broker: EmbeddedBroker, ops: OpsLog) -> None:
    await ops.append(large(1))
    (entry,) = await read(ops, 1)
    await asyncio.to_thread(broker.restart, kill=True)

    async def there_again() -> bool:
        try:
            return (await ops.whole(entry)).body == BODY
        except BrokerUnreachable:
            return False

    await until(there_again)


async def test_a_large_body_counts_with_its_own_size(bus: Bus, second_bus: Bus, ops: OpsLog) -> None:
    backlog = await Backlog.open(second_bus, (await Tables.open(second_bus)).backlogs, "g")
    await ops.append(large(1))
    await until(lambda: backlog.total == Load(1, len(BODY)))


async def test_a_full_broker_takes_no_large_body_and_says_so(bus: Bus, ops: OpsLog) -> None:
    await ensure_streams(bus, blobs_max_bytes=2 * 2**20)
    with pytest.raises(log.LogFull, match="the body of run:1#1 is refused"):
        await ops.append(large(1))
    assert await ops.get("run:1", 1) is None


@pytest.mark.parametrize("text", ["", "a", "a-1", "a-0-1", "a-1-0", "a-01-1", "a-1-1-1", "a-x-1"])
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        BlobRef.parse(text)


def scored(tokens: int, first: float = 0.0) -> Result:
    data = struct.pack("<f", first) + bytes(4 * (tokens - 1))
    outputs = ({"logprobs": Tensor(dtype="float32", shape=(tokens,), data=data)},)
    outcome = ForwardBackwardDone(loss_fn_outputs=outputs, metrics={"loss:sum": first})
    return Result(request_id="m#1", model_id="m", seq_id=1, outcome=outcome)


@pytest.mark.parametrize("as_tenant", [False, True])
async def test_a_result_above_one_message_reaches_who_waits(bus: Bus, demo_bus: Bus, as_tenant: bool) -> None:
    reader = Results(demo_bus, "demo") if as_tenant else Results(bus)
    waiting = asyncio.create_task(reader.wait("demo", "m", 1, 20))
    await asyncio.sleep(0.1)
    assert await Results(bus).publish("demo", scored(500_000)) is Published.NEW
    for found in (await waiting, await reader.get("demo", "m", 1)):
        assert found is not None
        assert found.result() == scored(500_000)


async def test_a_large_result_is_written_once(bus: Bus) -> None:
    results = Results(bus)
    answers = [await results.publish("demo", scored(500_000, first)) for first in (0.0, 0.0, 1.0)]
    assert answers == [Published.NEW, Published.SAME, Published.DIFFERENT]
    assert await results.publish("demo", scored(5)) is Published.DIFFERENT
    assert (await bus.js.stream_info(subjects.RESULTS_STREAM)).state.messages == 3


async def test_a_large_result_that_has_lost_a_piece_to_expiry_is_gone(bus: Bus) -> None:
    results = Results(bus)
    await results.publish("demo", scored(500_000))
    await bus.js.purge_stream(subjects.RESULTS_STREAM, seq=2)
    assert await results.get("demo", "m", 1) is None


async def test_trimming_drops_the_bodies_that_no_replay_needs(bus: Bus, ops: OpsLog) -> None:
    appended = [await ops.append(large(seq_id)) for seq_id in (0, 2, 1, 3)]
    await ops.append(large(0, model_id="other"))
    a_body = await pieces(bus) // 5
    await ops.trim("run:1", appended[3].position, 3)
    assert await pieces(bus) == 2 * a_body
    for model_id, seq_id in (("run:1", 3), ("other", 0)):
        kept = await ops.get(model_id, seq_id)
        assert kept is not None
        assert (await ops.whole(kept)).body == BODY
