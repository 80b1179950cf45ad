"""What the benchmark of the log makes of its samples, and the long log it writes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.log_cost import at_most, rate, write_trimmed
from bus.connection import connect
from bus.embedded import EmbeddedBroker
from bus.ledger import Ledger
from bus.log import OpsLog
from bus.tables import Tables
from runtime.service import BROKER_FOLDER, GROUP


def test_a_rate_is_that_from_the_first_sample_to_the_last() -> None:
    assert rate([(10.0, 4), (12.0, 9), (15.0, 14)]) == pytest.approx(2.0)
    assert rate([(10.0, 4)]) is None


async def test_no_more_than_so_many_run_at_a_time_and_all_of_them_run() -> None:
    running, most, done = 0, 0, 0

    async def one() -> None:
        nonlocal running, most, done
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        done += 1

    await at_most(3, (one() for _ in range(10)))
    assert (most, done) == (3, 10)


async def test_the_long_log_begins_at_its_last_event_and_the_ledger_has_them_all(tmp_path: Path) -> None:
    await write_trimmed(tmp_path, 20, 4)
    with EmbeddedBroker(tmp_path / BROKER_FOLDER) as broker:
        async with await connect(broker.url, broker.credentials, name="test") as bus:
            assert await OpsLog(bus, GROUP).last_position() == 20
            left = [entry.position async for entry in OpsLog(bus, GROUP).so_far()]
            assert left == [20]
            assert len(await (await Ledger.open(bus, GROUP)).load()) == 20
            rows = await (await Tables.open(bus)).models.all()
            assert {(str(name), row.status, row.trimmed_below) for name, row in rows.items()} == {
                (f"ended-{number}", "unloaded", 5) for number in range(4)
            }
