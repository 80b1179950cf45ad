"""Ended models leave nothing once their results have expired, and keep a definite answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bus import scan, subjects
from bus.connection import Bus
from bus.embedded import EmbeddedBroker
from bus.events import OptimStep, OptimStepDone
from bus.ledger import Ledger
from bus.log import OpsLog
from bus.results import Results
from bus.tables import ModelRow, Tables
from runtime import upkeep
from runtime.service import GROUP
from tests.runtime.written_log import answer, append, server


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[Bus]:
    with EmbeddedBroker(tmp_path / "nats", sync_interval="2m") as broker:
        async with server(broker) as connected:
            yield connected


async def test_a_model_that_ended_goes_with_its_last_result_and_no_other_does(bus: Bus) -> None:
    tables, ledger = await Tables.open(bus), await Ledger.open(bus, GROUP)
    log, results = OpsLog(bus, GROUP), Results(bus)
    for model_id, status in (("live", "live"), ("ended", "unloaded"), ("readable", "unloaded")):
        row = ModelRow(tenant="demo", base_model="tiny", created_at=1.0, status=status)  # type: ignore[arg-type]
        await tables.models.put(model_id, row)
        for number in range(3):
            await append(bus, "demo", model_id, number, OptimStep())
            await answer(bus, "demo", model_id, number, OptimStepDone(metrics={}))
            await ledger.record(model_id, number, "hash", "done", 1)
    for model_id in ("live", "ended"):
        await scan.purge(bus, subjects.RESULTS_STREAM, subjects.results_of("demo", model_id))
    assert await upkeep.ended(log, results, tables.models) == ["ended"]
    await upkeep.drop_from(log, ledger, "ended")
    await upkeep.drop_from(log, ledger, "ended")
    assert await log.models() == {"live", "readable"}
    assert {model_id for model_id, _ in await ledger.load()} == {"live", "readable"}
    assert await upkeep.ended(log, results, tables.models) == []
