"""What a new life of a group does with what it finds: real tables and snapshot folders; the ranks are a stand-in."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.contract import AdapterConfig, PassFailed, TenantConfig
from actors.group import MegatronGroup
from bus.connection import Bus, connect
from bus.embedded import EmbeddedBroker
from bus.events import Failed, LoraConfig, OptimStep
from bus.log import LogEntry, OpsLog
from bus.tables import ModelRow, Tables
from observability.recorder import Recorder
from runtime import entries, snapshots
from runtime.config import Settings
from runtime.hand_over import HandOver
from runtime.job import Job
from runtime.lost_calls import OpenWindow
from runtime.recovery import Recovery
from runtime.sequencer import LaneState, Sequencer
from runtime.services import Services
from runtime.snapshots import Snapshots

BITS = {"torch": "2"}
ADAPTER = AdapterConfig(rank=4, alpha=32.0, seed=7)


NO_CHECKPOINTS: tuple[Any, Any] = (None, None)


async def no_result(entry: LogEntry) -> None:
    """Nothing had its result in an earlier life."""


class Ranks:
    """Ranks that cannot read some snapshots."""

    spec = None

    def __init__(self, *broken: str) -> None:
        self.broken = broken
        self.restored: list[tuple[str, TenantConfig, str]] = []

    async def restore(self, model_id: str, config: TenantConfig, folder: Path) -> None:
        if folder.name in self.broken:
            raise PassFailed("a rank's file cannot be read")
        self.restored.append((model_id, config, folder.name))


@pytest.fixture
async def bus(broker: EmbeddedBroker) -> AsyncIterator[Bus]:
    async with await connect(broker.url, broker.credentials, name="test") as connected:
        yield connected


class Life:
    """One that begins with the given models' rows and snapshots."""

    def __init__(self, bus: Bus, folder: Path, ranks: Ranks) -> None:
        self.kept = Snapshots(folder)
        self.ranks = ranks
        self.bus = bus
        self.sequencer = Sequencer()
        self.hand_over = HandOver(
            Settings(), cast(MegatronGroup, ranks), OpsLog(bus, "main").whole, no_result, *NO_CHECKPOINTS
        )

    async def row(self, model_id: str, **more: object) -> None:
        tables = await Tables.open(self.bus)
        made = ModelRow(tenant="demo", base_model="tiny", created_at=1.0, lora=LoraConfig(rank=4), **more)  # type: ignore[arg-type]
        await tables.models.put(model_id, made)

    def snapshot(self, model_id: str, next_seq: int) -> str:
        aside = self.kept.begin(model_id)
        (aside / "rank0.pt").write_bytes(b"x")
        lane = LaneState(next_seq=next_seq, log_from=next_seq + 1)
        window = OpenWindow({}, last_step=next_seq - 1)
        self.kept.commit(aside, snapshots.manifest(model_id, ADAPTER, lane, window, BITS))
        return self.kept.of(model_id)[0].folder.name

    async def begins(self) -> set[str]:
        tables = await Tables.open(self.bus)
        fields = SimpleNamespace(settings=Settings(), tables=tables, recorder=Recorder("test", group="main"))
        recovery = Recovery(cast(Services, fields), cast(MegatronGroup, self.ranks), self.kept, BITS)
        return await recovery.resume(self.sequencer, self.hand_over)


@pytest.fixture
def model_id() -> str:
    return f"run:{secrets.token_hex(4)}"


async def test_a_model_goes_on_from_its_newest_snapshot(bus: Bus, tmp_path: Path, model_id: str) -> None:
    life = Life(bus, tmp_path, Ranks())
    await life.row(model_id, status="live")
    life.snapshot(model_id, 3)
    newest = life.snapshot(model_id, 8)
    await life.begins()
    assert life.ranks.restored == [(model_id, ADAPTER, newest)]
    assert life.hand_over.config(model_id) == ADAPTER
    assert life.sequencer.taken(model_id, 7)
    assert not life.sequencer.taken(model_id, 8)


async def test_what_a_rank_cannot_read_costs_the_older_snapshots_replay(
    bus: Bus, tmp_path: Path, model_id: str
) -> None:
    ranks = Ranks()
    life = Life(bus, tmp_path, ranks)
    await life.row(model_id, status="live", trimmed_below=3)
    older = life.snapshot(model_id, 3)
    ranks.broken = (life.snapshot(model_id, 8),)
    await life.begins()
    assert ranks.restored == [(model_id, ADAPTER, older)]
    assert not life.sequencer.taken(model_id, 3)


@pytest.mark.parametrize("there", [0, 2])
async def test_a_model_without_a_usable_snapshot_and_with_a_trimmed_log_is_lost_and_says_so(
    bus: Bus, tmp_path: Path, model_id: str, there: int
) -> None:
    ranks = Ranks()
    life = Life(bus, tmp_path, ranks)
    await life.row(model_id, status="live", trimmed_below=5)
    ranks.broken = tuple(life.snapshot(model_id, next_seq) for next_seq in range(5, 5 + there))
    await life.begins()
    assert life.hand_over.config(model_id) is None
    life.sequencer.offer(at(entries.of_op("demo", model_id, 5, OptimStep()), 9))
    turn = life.sequencer.next_turn()
    assert turn is not None
    job = Job(turn.entry, "optim_step", 0.0, 0.0)
    await life.hand_over.begin(job, turn)
    assert job.outcome == Failed(
        error=f"model_id {model_id!r} is lost: none of its snapshots can be read, and the log begins after its "
        "creation",
        category="server",
        field="model_id",
    )


async def test_without_a_snapshot_the_whole_log_is_repeated(bus: Bus, tmp_path: Path, model_id: str) -> None:
    life = Life(bus, tmp_path, Ranks())
    await life.row(model_id, status="live")
    ended = f"{model_id}:ended"
    await life.row(ended, status="unloaded")
    assert ended in await life.begins()
    assert life.ranks.restored == []
    assert not life.sequencer.taken(model_id, 0)


def at(entry: LogEntry, position: int) -> LogEntry:
    return dataclasses.replace(entry, position=position)
