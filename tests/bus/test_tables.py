from __future__ import annotations

import asyncio

import msgspec
import pytest

from bus.connection import Bus
from bus.events import LoraConfig
from bus.ledger import Ledger, LedgerRow
from bus.tables import ModelRow, Table, Tables, existing_table, open_table
from tests.bus.proxy import Proxy
from tests.bus.waiting import until


class Counter(msgspec.Struct, frozen=True):
    count: int


@pytest.fixture
async def counters(bus: Bus) -> Table[Counter]:
    return await open_table(bus, "test_counters", Counter)


async def test_a_row_is_created_once(counters: Table[Counter]) -> None:
    assert await counters.get("a") is None
    assert await counters.create("a", Counter(1))
    assert not await counters.create("a", Counter(2))
    found = await counters.get("a")
    assert found is not None
    assert found[0] == Counter(1)


async def test_an_update_needs_the_revision_it_read(counters: Table[Counter]) -> None:
    first = await counters.put("a", Counter(1))
    assert await counters.update("a", Counter(2), first)
    assert not await counters.update("a", Counter(3), first)
    found = await counters.get("a")
    assert found is not None
    assert found[0] == Counter(2)
    assert found[1] > first


async def test_concurrent_updates_by_revision_lose_no_count(
    counters: Table[Counter], second_bus: Bus
) -> None:
    other = await open_table(second_bus, "test_counters", Counter)
    await counters.put("a", Counter(0))

    async def add_ten(table: Table[Counter]) -> None:
        done = 0
        while done < 10:
            found = await table.get("a")
            assert found is not None
            done += await table.update("a", Counter(found[0].count + 1), found[1]) is not None

    await asyncio.gather(add_ten(counters), add_ten(other))
    found = await counters.get("a")
    assert found is not None
    assert found[0] == Counter(20)


async def test_a_deleted_row_is_gone_and_its_key_free(counters: Table[Counter]) -> None:
    await counters.put("a", Counter(1))
    await counters.put("b", Counter(2))
    await counters.delete("a")
    assert await counters.get("a") is None
    assert await counters.all() == {"b": Counter(2)}
    assert await counters.create("a", Counter(3))
    assert not await counters.create("a", Counter(4))
    assert sorted(await counters.keys()) == ["a", "b"]


async def test_keys_may_be_any_ids_and_several(counters: Table[Counter]) -> None:
    await counters.put("run:train:0", Counter(1))
    await counters.put("a.b *>", Counter(2))
    await counters.put(("g", "m.1", "7"), Counter(3))
    await counters.put(("g", "m", "8"), Counter(4))
    assert set(await counters.keys()) == {"run:train:0", "a.b *>", ("g", "m.1", "7"), ("g", "m", "8")}
    assert await counters.all(("g", "m")) == {("g", "m", "8"): Counter(4)}
    await counters.purge(("g", "m"))
    assert await counters.all("g") == {("g", "m.1", "7"): Counter(3)}


async def test_more_rows_than_one_batch_are_all_there(counters: Table[Counter]) -> None:
    await asyncio.gather(*(counters.put(str(i), Counter(i)) for i in range(300)))
    assert await counters.all() == {str(i): Counter(i) for i in range(300)}


async def test_a_row_of_a_newer_server_is_still_read(bus: Bus, counters: Table[Counter]) -> None:
    class Newer(msgspec.Struct, frozen=True):
        count: int
        colour: str = "red"

    newer = await open_table(bus, "test_counters", Newer)
    await newer.put("a", Newer(5))
    found = await counters.get("a")
    assert found is not None
    assert found[0] == Counter(5)


async def test_a_create_whose_answer_was_lost_still_knows_that_it_won(
    counters: Table[Counter], frail_bus: Bus, proxy: Proxy
) -> None:
    frail = Table(frail_bus, "test_counters", Counter)
    proxy.muted = True
    creating = asyncio.create_task(frail.create("a", Counter(1)))
    await until(lambda: counters.get("a"))
    proxy.muted = False
    proxy.cut()
    assert await creating


async def test_the_services_tables_hold_its_rows(bus: Bus) -> None:
    tables = await Tables.open(bus)
    row = ModelRow(tenant="demo", base_model="tiny", created_at=1.5, lora=LoraConfig(rank=8))
    assert await tables.models.create("run:train:0", row)
    assert await (await Tables.open(bus)).models.all() == {"run:train:0": row}


async def test_the_ledger_knows_what_became_of_every_operation(bus: Bus) -> None:
    ledger = await Ledger.open(bus, "default")
    other = await Ledger.open(bus, "other-group")
    assert await ledger.find("m:1", 1) is None
    await ledger.record("m:1", 1, "aa", "done", 7)
    await ledger.record("m:1", 1, "aa", "done", 7)
    await ledger.record("m:1", None, "bb", "failed", 9)
    await ledger.record("m2", 1, "cc", "done", 8)
    await other.record("m3", 1, "dd", "done", 10)
    assert await ledger.find("m:1", 1) == LedgerRow(body_hash="aa", outcome="done", position=7)
    assert {key: row.position for key, row in (await ledger.load()).items()} == {
        ("m:1", 1): 7,
        ("m:1", None): 9,
        ("m2", 1): 8,
    }
    await ledger.forget("m:1")
    assert list(await ledger.load()) == [("m2", 1)]
    assert list(await other.load()) == [("m3", 1)]


async def test_who_only_looks_makes_no_table(bus: Bus) -> None:
    assert await existing_table(bus, "test_counters", Counter) is None
    assert await Ledger.existing(bus, "default") is None
    table = await open_table(bus, "test_counters", Counter)
    await table.put("a", Counter(1))
    await (await Ledger.open(bus, "default")).record("m", 1, "hash", "done", 7)
    found, ledger = await existing_table(bus, "test_counters", Counter), await Ledger.existing(bus, "default")
    assert found is not None
    assert ledger is not None
    assert await found.all() == {"a": Counter(1)}
    assert await ledger.find("m", 1) == LedgerRow(body_hash="hash", outcome="done", position=7)
