"""What a trim drops, and what it leaves: a recovery, an answer or a reader may need it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from actors.contract import AdapterConfig
from bus import scan, subjects
from bus.connection import Bus
from bus.embedded import EmbeddedBroker
from bus.events import OptimStep, OptimStepDone
from bus.ledger import Ledger
from bus.log import OpsLog
from bus.tables import ModelRow, Tables
from runtime import snapshots
from runtime.cli.main import app
from runtime.lost_calls import OpenWindow
from runtime.sequencer import LaneState
from runtime.service import GROUP
from runtime.snapshots import Snapshots
from runtime.trim import apply, cuts
from tests.runtime.written_log import answer, append, server


@pytest.fixture
def broker(tmp_path: Path) -> Any:
    with EmbeddedBroker(tmp_path / "nats", sync_interval="2m") as started:
        yield started


@pytest.fixture
async def bus(broker: EmbeddedBroker) -> AsyncIterator[Bus]:
    async with server(broker) as connected:
        yield connected


async def trained(bus: Bus, model_id: str, status: str, *, expired: bool = False) -> None:
    """Five operations with their results and ledger rows."""
    tables, ledger = await Tables.open(bus), await Ledger.open(bus, GROUP)
    row = ModelRow(tenant="demo", base_model="tiny", created_at=1.0, status=status)  # type: ignore[arg-type]
    await tables.models.put(model_id, row)
    for number in range(5):
        await append(bus, "demo", model_id, number, OptimStep())
        await answer(bus, "demo", model_id, number, OptimStepDone(metrics={}))
        await ledger.record(model_id, number, "hash", "done", 1)
    if expired:
        await scan.purge(bus, subjects.RESULTS_STREAM, subjects.results_of("demo", model_id))


async def snapshot(bus: Bus, kept: Snapshots, model_id: str, next_seq: int) -> None:
    entry = await OpsLog(bus, GROUP).get(model_id, next_seq)
    assert entry is not None
    assert entry.position is not None
    lane = LaneState(next_seq=next_seq, log_from=entry.position)
    config = AdapterConfig(rank=4, alpha=32.0, seed=0)
    kept.commit(kept.begin(model_id), snapshots.manifest(model_id, config, lane, OpenWindow(), {}))


async def test_each_model_loses_what_nothing_needs(bus: Bus, tmp_path: Path) -> None:
    kept = Snapshots(tmp_path / "snapshots" / GROUP)
    await trained(bus, "ended", "unloaded", expired=True)
    await trained(bus, "readable", "unloaded")
    await trained(bus, "one", "live")
    await trained(bus, "two", "live")
    await snapshot(bus, kept, "one", 3)
    for next_seq in (2, 4):
        await snapshot(bus, kept, "two", next_seq)
    found = {one.model_id: one for one in await cuts(bus, GROUP, kept)}
    went = {name: (one.entries, one.stay, one.ledger_rows) for name, one in found.items()}
    assert went == {"ended": (5, 0, 5), "readable": (0, 5, 0), "one": (0, 5, 0), "two": (2, 3, 0)}
    assert found["one"].because == "a recovery needs all of it: it has 1 of 2 snapshots"
    assert found["readable"].because == "ended; 5 of its results can still be read"
    log, tables = OpsLog(bus, GROUP), await Tables.open(bus)
    assert len([entry async for entry in log.so_far()]) == 20  # looking drops nothing
    for one in found.values():
        await apply(bus, GROUP, one)
    assert {name: await log.numbers(name) for name in found} == {
        "ended": set(),
        "readable": set(range(5)),
        "one": set(range(5)),
        "two": {2, 3, 4},
    }
    row = await tables.models.get("two")
    assert row is not None
    assert row[0].trimmed_below == 2
    rows = [name for name, _ in await (await Ledger.open(bus, GROUP)).load()]
    assert sorted(set(rows)) == ["one", "readable", "two"]  # the ledger of a live model is never trimmed
    assert [one.entries for one in await cuts(bus, GROUP, kept)] == [0, 0, 0]


async def test_the_command_shows_what_would_go_and_then_what_went(bus: Bus, tmp_path: Path) -> None:
    await trained(bus, "ended", "unloaded", expired=True)
    await trained(bus, "one", "live")
    log = OpsLog(bus, GROUP)

    async def said(*arguments: str) -> Any:
        from asyncio import to_thread

        return await to_thread(CliRunner().invoke, app, ["log", "trim", "--data", str(tmp_path), *arguments])

    dry = await said("--dry-run")
    assert (dry.exit_code, await log.numbers("ended")) == (0, set(range(5)))
    assert "5 operations" in dry.stdout
    assert "5 ledger rows would go" in dry.stdout
    refused = await said("one")
    assert (refused.exit_code, refused.stderr) == (
        1,
        "tinkerbus: nothing of model 'one' is dropped: a recovery needs all of it: it has 0 of 2 snapshots\n",
    )
    assert "ledger rows went" in (await said()).stdout
    assert (await log.numbers("ended"), await log.numbers("one")) == (set(), set(range(5)))
