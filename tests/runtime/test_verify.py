"""A log is run again and compared: real broker, log and results; the ranks are a stand-in with known answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from actors.contract import AdapterConfig, PassFailed, StepOutput
from actors.group import MegatronGroup
from actors.models import tiny
from bus.connection import Bus
from bus.embedded import EmbeddedBroker
from bus.events import (
    CreateModel,
    Failed,
    LoraConfig,
    ModelCreated,
    ModelUnloaded,
    OptimStep,
    OptimStepDone,
    Refused,
    SaveWeights,
    UnloadModel,
)
from bus.ledger import Ledger
from bus.log import OpsLog
from bus.results import Results
from bus.tables import ModelRow
from runtime import outcomes, snapshots
from runtime.config import Settings
from runtime.fingerprint import FingerprintDiffers
from runtime.lost_calls import OpenWindow
from runtime.sequencer import LaneState
from runtime.service import GROUP
from runtime.snapshots import Snapshot, Snapshots
from runtime.verdicts import Checked
from runtime.verify import Plan, Progress, Sources, Verifier, check_bits, plan, plans
from tests.runtime.written_log import answer, append, server

ADAPTER = AdapterConfig(rank=4, alpha=32.0, seed=0)
LORA = LoraConfig(rank=4)


class Ranks:
    """Ranks whose steps report how many they have made."""

    spec = tiny.spec()

    def __init__(self, *broken: str) -> None:
        self.steps = 0
        self.broken = broken
        self.handed: list[str] = []

    def create(self, model_id: str, config: Any) -> asyncio.Task[None]:
        self.steps = 0
        return self._done("create", None)

    def unload(self, model_id: str) -> asyncio.Task[None]:
        return self._done("unload", None)

    async def restore(self, model_id: str, config: Any, folder: Path) -> None:
        if folder.name in self.broken:
            raise PassFailed("a rank's file cannot be read")
        self.steps = int(folder.name.partition("-")[0]) - 1
        self.handed.append(f"restore {folder.name}")

    def optim_step(self, model_id: str, adam: Any, known: frozenset[int]) -> asyncio.Task[StepOutput]:
        self.steps += 1
        return self._done("optim_step", step(self.steps))

    def _done(self, what: str, value: Any) -> asyncio.Task[Any]:
        self.handed.append(what)
        return asyncio.ensure_future(asyncio.sleep(0, value))


def step(number: int) -> StepOutput:
    return StepOutput(
        grad_norm=0.5,
        skipped=False,
        step=number,
        window_calls=0,
        window_tokens=0,
        finalizations=1,
        seconds=0.0,
    )


def stepped(number: int) -> OptimStepDone:
    return cast(OptimStepDone, outcomes.optim_step_done(step(number)))


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[Bus]:
    with EmbeddedBroker(tmp_path / "nats", sync_interval="2m") as broker:
        async with server(broker) as connected:
            yield connected


async def train(bus: Bus, model_id: str = "m", steps: int = 3) -> None:
    """A creation and some steps, answered as the stand-in answers them."""
    await append(bus, "demo", model_id, 0, CreateModel(base_model="tiny", lora=LORA))
    await answer(bus, "demo", model_id, 0, ModelCreated(model_id=model_id, base_model="tiny", lora=LORA))
    for number in range(1, steps + 1):
        await append(bus, "demo", model_id, number, OptimStep())
        await answer(bus, "demo", model_id, number, stepped(number))


async def verified(bus: Bus, ranks: Ranks, plan: Plan) -> tuple[dict[int | None, Checked], Progress]:
    verifier = Verifier(Settings(), await Sources.open(bus, GROUP), cast(MegatronGroup, ranks))
    progress = Progress()
    return {one.seq_id: one async for one in verifier.model(plan, progress)}, progress


def verdicts(found: dict[int | None, Checked]) -> dict[int | None, str]:
    return {seq_id: one.verdict for seq_id, one in found.items()}


WHOLE = Plan("m", 0, from_creation=True)


async def test_what_comes_to_the_published_results_is_the_same_and_nothing_is_written(bus: Bus) -> None:
    await train(bus)
    before = await OpsLog(bus, GROUP).last_position(), await Results(bus).last_position()
    found, progress = await verified(bus, Ranks(), WHOLE)
    assert verdicts(found) == dict.fromkeys(range(4), "same")
    assert progress.begins == "creation"
    assert (await OpsLog(bus, GROUP).last_position(), await Results(bus).last_position()) == before
    assert await Ledger.existing(bus, GROUP) is None


async def test_a_result_that_differs_is_named_with_its_field_and_by_how_much(bus: Bus) -> None:
    await train(bus, steps=1)
    await append(bus, "demo", "m", 2, OptimStep())
    await answer(bus, "demo", "m", 2, OptimStepDone(metrics={**stepped(2).metrics, "grad_norm": 0.75}))
    found, _ = await verified(bus, Ranks(), WHOLE)
    assert verdicts(found) == {0: "same", 1: "same", 2: "differs"}
    (difference,) = found[2].differences
    assert (difference.field, difference.by) == ("metrics.grad_norm", 0.25)


async def test_expired_unanswered_and_held_operations_are_told_apart(bus: Bus) -> None:
    await train(bus, steps=1)
    for number in (2, 3, 5):
        await append(bus, "demo", "m", number, OptimStep())
    ledger = await Ledger.open(bus, GROUP)
    await ledger.record("m", 2, "hash", "done", 3)
    found, _ = await verified(bus, Ranks(), WHOLE)
    assert verdicts(found) == {0: "same", 1: "same", 2: "expired", 3: "unanswered", 5: "unanswered"}
    await ledger.record("m", 5, "hash", "done", 5)
    found, _ = await verified(bus, Ranks(), WHOLE)
    assert (found[5].verdict, found[5].because) == ("not_reached", "seq_id 4 is not on the log, or no longer")


async def test_a_step_that_failed_for_a_lost_call_fails_again_by_what_was_known_then(bus: Bus) -> None:
    await train(bus, steps=0)
    await append(bus, "demo", "m", 1, Refused(error="no such loss", verb="forward_backward"))
    await answer(bus, "demo", "m", 1, Failed(error="no such loss", category="user"))
    await append(bus, "demo", "m", 2, OptimStep())
    await answer(bus, "demo", "m", 2, outcomes.step_lost(1))
    ranks = Ranks()
    ranks.clear_window = lambda model_id: ranks._done("clear_window", None)  # type: ignore[attr-defined]
    await (await Ledger.open(bus, GROUP)).record("m", 1, "hash", "failed", 2, horizon=3)
    found, _ = await verified(bus, ranks, WHOLE)
    assert verdicts(found) == dict.fromkeys(range(3), "same")


async def test_what_would_write_a_checkpoint_does_not_run(bus: Bus) -> None:
    await train(bus, steps=1)
    await append(bus, "demo", "m", 2, SaveWeights(name="x"))
    await append(bus, "demo", "m", 3, OptimStep())
    await answer(bus, "demo", "m", 3, stepped(2))
    found, _ = await verified(bus, Ranks(), WHOLE)
    assert verdicts(found) == {0: "same", 1: "same", 2: "not_run", 3: "same"}


async def test_a_model_that_ended_is_run_to_its_end(bus: Bus) -> None:
    await train(bus, steps=1)
    await append(bus, "demo", "m", None, UnloadModel())
    await answer(bus, "demo", "m", None, ModelUnloaded(model_id="m"))
    ranks = Ranks()
    found, _ = await verified(bus, ranks, WHOLE)
    assert verdicts(found) == dict.fromkeys((0, 1, None), "same")
    assert ranks.handed.count("unload") == 1


def snapshot(folder: Path, next_seq: int) -> Snapshot:
    kept = Snapshots(folder)
    lane = LaneState(next_seq=next_seq, log_from=next_seq + 1)
    kept.commit(kept.begin("m"), snapshots.manifest("m", ADAPTER, lane, OpenWindow(), {"torch": "2"}))
    return kept.of("m")[0]


async def test_a_trimmed_log_is_run_from_the_oldest_snapshot_that_can_be_read(
    bus: Bus, tmp_path: Path
) -> None:
    await train(bus, steps=4)
    await OpsLog(bus, GROUP).trim("m", 3, 2)
    older, newer = snapshot(tmp_path / "s", 2), snapshot(tmp_path / "s", 3)
    trimmed = Plan("m", 3, from_creation=False, snapshots=(older, newer))
    found, progress = await verified(bus, Ranks(), trimmed)
    assert (verdicts(found), progress.begins) == (dict.fromkeys((2, 3, 4), "same"), "snapshot before 2")
    found, progress = await verified(bus, Ranks(older.folder.name), trimmed)
    assert (verdicts(found), progress.begins) == (dict.fromkeys((3, 4), "same"), "snapshot before 3")
    found, _ = await verified(bus, Ranks(older.folder.name, newer.folder.name), trimmed)
    assert set(verdicts(found).values()) == {"not_reached"}


def test_a_replay_begins_at_the_creation_where_the_log_is_whole_else_at_the_oldest_snapshot(
    tmp_path: Path,
) -> None:
    older, newer = snapshot(tmp_path, 2), snapshot(tmp_path, 3)
    row = ModelRow(tenant="demo", base_model="tiny", created_at=1.0)
    assert plan("m", row, {0, 1}, [newer, older]) == Plan("m", 2, from_creation=True)
    trimmed = ModelRow(tenant="demo", base_model="tiny", created_at=1.0, trimmed_below=2)
    for some, numbers in ((trimmed, {0, 3}), (row, {3})):
        found = plan("m", some, cast(Any, numbers), [newer, older])
        assert (found.from_creation, found.snapshots) == (False, (older, newer))


async def test_looking_leaves_a_snapshot_that_is_being_written(bus: Bus, tmp_path: Path) -> None:
    await train(bus, steps=1)
    aside = Snapshots(tmp_path / "s").begin("m")
    await plans(await Sources.open(bus, GROUP), Snapshots.to_read(tmp_path / "s"), None)
    assert aside.is_dir()


def test_other_bits_are_refused_by_name_until_they_are_accepted() -> None:
    kept, now = [{"torch": "2.13", "layout": "dp=1"}], {"torch": "2.14", "layout": "dp=1"}
    with pytest.raises(FingerprintDiffers, match=r"torch was 2\.13 and is 2\.14; --accept-new-bits"):
        check_bits(kept, now, accept=False)
    assert check_bits(kept, now, accept=True) == ["torch was 2.13 and is 2.14"]
    with pytest.raises(FingerprintDiffers, match="another layout"):
        check_bits(kept, {"torch": "2.13", "layout": "dp=2"}, accept=True)
