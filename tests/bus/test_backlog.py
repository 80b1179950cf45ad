"""How much waits, as every server counts it: the dispatcher's report, and what came after it."""

from __future__ import annotations

from bus import log
from bus.backlog import Backlog, Load
from bus.connection import Bus
from bus.log import OpsLog
from bus.tables import BacklogRow, Tables
from tests.bus.waiting import until


def entry(seq_id: int, size: int = 10, model_id: str = "a:1") -> log.LogEntry:
    return log.entry("demo", model_id, seq_id, "optim_step", bytes(size))


async def test_what_another_server_appends_is_counted_without_asking(bus: Bus, second_bus: Bus) -> None:
    tables, other = await Tables.open(bus), OpsLog(second_bus, "g")
    backlog = await Backlog.open(bus, tables.backlogs, "g")
    await other.append(entry(1))
    await other.append(entry(2, size=100))
    await OpsLog(second_bus, "another-group").append(entry(3))
    await until(lambda: backlog.of("a:1") == Load(2, 110))
    assert backlog.total == Load(2, 110)
    await backlog.close()


async def test_a_report_takes_the_place_of_what_it_has_counted(bus: Bus) -> None:
    tables, ops = await Tables.open(bus), OpsLog(bus, "g")
    backlog = await Backlog.open(bus, tables.backlogs, "g")
    for seq_id in range(1, 5):
        await ops.append(entry(seq_id))
    await until(lambda: backlog.total == Load(4, 40))
    await tables.backlogs.put("g", BacklogRow(position=3, models={"a:1": (1, 10), "b": (2, 7)}))
    await backlog.refresh(0)
    assert (backlog.of("a:1"), backlog.of("b"), backlog.total) == (Load(2, 20), Load(2, 7), Load(4, 27))
    await tables.backlogs.put("g", BacklogRow(position=4))
    await backlog.refresh(0)
    assert (backlog.of("a:1"), backlog.total) == (Load(), Load())


async def test_an_own_append_counts_from_its_start_and_once(bus: Bus) -> None:
    tables, ops = await Tables.open(bus), OpsLog(bus, "g")
    backlog = await Backlog.open(bus, tables.backlogs, "g")
    with backlog.appending("a:1", 10) as appended_at:
        assert backlog.total == Load(1, 10)
        appended = await ops.append(entry(1))
        appended_at(appended.position)
    await ops.append(entry(2))
    await until(lambda: backlog.total == Load(2, 20))
    with backlog.appending("a:1", 10):
        pass  # refused by the broker
    assert backlog.total == Load(2, 20)


async def test_a_server_that_starts_knows_what_was_reported(bus: Bus) -> None:
    tables = await Tables.open(bus)
    await tables.backlogs.put("g", BacklogRow(position=7, models={"m": (3, 30)}))
    backlog = await Backlog.open(bus, tables.backlogs, "g")
    await backlog.refresh(0)
    assert backlog.of("m") == Load(3, 30)
