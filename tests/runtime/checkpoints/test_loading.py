"""Who may load what into what; and that a replay loads what was loaded before, or loses the model."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil

import msgspec
import pytest

from bus.events import (
    AdamParams,
    Checkpoint,
    CreateModel,
    Failed,
    LoraConfig,
    ModelCreated,
    OptimStep,
    SaveWeights,
    SaveWeightsForSampler,
    WeightsLoaded,
)
from bus.ledger import LedgerRow
from runtime.checkpoints.store import Store
from tests.runtime.checkpoints.conftest import ADAPTER, Life, failed, finished


def row(outcome: str, loaded: str | None = None) -> LedgerRow:
    return LedgerRow(body_hash="", outcome=outcome, position=1, loaded=loaded)  # type: ignore[arg-type]


@pytest.fixture
async def path(life: Life) -> str:
    await life.run(SaveWeights(name="x"), 1)
    return f"tinker://{life.model_id}/weights/x"


async def url(life: Life) -> str:
    found = await life.tables.checkpoints.get((life.model_id, "weights", "x"))
    assert found is not None
    return found[0].url


async def test_a_tenant_loads_its_own(life: Life, path: str) -> None:
    assert await life.load(path, optimizer=True) == WeightsLoaded(path=path, model_id=life.model_id)
    ((model_id, folder, optimizer),) = life.ranks.loaded
    assert (model_id, f"file://{folder}", optimizer) == (life.model_id, await url(life), True)


async def test_anothers_is_answered_like_what_does_not_exist_unless_it_is_public(
    life: Life, path: str
) -> None:
    assert failed(await life.load(path, tenant="other")) == Failed(
        error=f"path {path!r} is not known", category="user", field="path"
    )
    missing = path + "y"
    assert failed(await life.load(missing)).error == f"path {missing!r} is not known"
    await life.tables.checkpoints.change(
        (life.model_id, "weights", "x"), lambda r: msgspec.structs.replace(r, public=True)
    )
    assert isinstance(await life.load(path, tenant="other"), WeightsLoaded)


async def test_what_does_not_fit_is_refused_before_the_ranks_hear_of_it(life: Life, path: str) -> None:
    await life.run(SaveWeightsForSampler(name="x"), 2)
    sampler = f"tinker://{life.model_id}/sampler_weights/x"
    assert failed(await life.load(sampler, optimizer=True)).field == "optimizer"
    assert "not a checkpoint's" in failed(await life.load("tinker://a/b")).error
    life.hand_over.resume(life.model_id, dataclasses.replace(ADAPTER, train_mlp=False))
    refused = failed(await life.load(path))
    assert (refused.category, refused.field) == ("user", "path")
    assert "train_mlp" in refused.error
    assert life.ranks.loaded == []


async def test_files_that_cannot_be_read_are_the_servers_fault(life: Life, path: str) -> None:
    life.ranks.error = "the tensor is not there"
    outcome = failed(await life.load(path))
    assert (outcome.category, "as it was" in outcome.error) == ("server", True)
    life.store.remove(await url(life))
    assert failed(await life.load(path)).category == "server"
    assert life.hand_over.config(life.model_id) == ADAPTER


async def test_a_load_ends_the_window_and_forgets_what_it_had_lost(life: Life, path: str) -> None:
    life.hand_over.lost.add(life.model_id, 5, horizon=1000)
    await life.load(path, seq_id=6)
    assert life.hand_over.lost.settle(life.model_id, 7, position=8).lost is None
    life.hand_over.lost.add(life.model_id, 8, horizon=1000)
    failed(await life.load(path + "y", seq_id=9))
    assert life.hand_over.lost.settle(life.model_id, 10, position=11).lost == 8


async def test_a_model_starts_from_a_checkpoint_with_its_configuration(life: Life, path: str) -> None:
    start = Checkpoint(path=path, optimizer=True)
    new = f"{life.model_id}:b"
    made = await life.run(CreateModel(base_model="", start=start), 0, model_id=new)
    assert made == ModelCreated(model_id=new, base_model="tiny", lora=LoraConfig(rank=4, seed=7))
    assert life.hand_over.config(new) == ADAPTER
    for op, field in (
        (CreateModel(base_model="gpt-5", start=start), "base_model"),
        (CreateModel(base_model="tiny", lora=LoraConfig(rank=9), start=start), "lora"),
        (CreateModel(base_model="", start=Checkpoint(path=path + "y")), "path"),
    ):
        assert failed(await life.run(op, 0, model_id=f"{new}-{field}")).field == field
    after = failed(await life.run(OptimStep(adam_params=AdamParams()), 1, model_id=f"{new}-path"))
    assert "was not created" in after.error


async def test_a_replay_loads_what_was_loaded_then_whatever_has_the_name_now(life: Life, path: str) -> None:
    first = await url(life)
    with life.store.here(first) as folder:
        kept = folder.with_name("kept.1-0123456789ab")
        shutil.copytree(folder, kept)
    await life.run(SaveWeights(name="x", overwrite=True), 2)
    outcome = WeightsLoaded(path=path, model_id=life.model_id)
    life.told = row("done", f"file://{kept}"), outcome
    assert await life.load(path) == outcome
    assert life.ranks.loaded[-1][1] == kept


async def test_a_replay_that_cannot_load_again_loses_the_model_and_says_so(life: Life, path: str) -> None:
    outcome = WeightsLoaded(path=path, model_id=life.model_id)
    gone = (await url(life)).replace("x.1-", "gone.1-")
    life.told = row("done", gone), outcome
    assert await life.load(path) == outcome  # the result that was published stands
    life.told = None
    after = failed(await life.run(OptimStep(), 51))
    assert after.category == "server"
    assert "seq_id 50 loaded a checkpoint that cannot be loaded again" in after.error
    assert life.ranks.unloaded == [life.model_id]
    assert life.hand_over.config(life.model_id) is None


async def test_a_load_that_failed_fails_in_every_replay(life: Life, path: str) -> None:
    before = Failed(error=f"path {path!r} is not known", category="user", field="path")
    life.told = row("failed"), before
    assert await life.load(path) == before
    assert life.ranks.loaded == []


async def test_a_save_that_is_over_is_not_repeated(life: Life, path: str) -> None:
    before = await life.run(SaveWeights(name="x"), 1)
    life.store.remove(await url(life))
    life.told = row("done"), before
    job = await life.begin(SaveWeights(name="x"), 1)
    assert (job.ranks, job.outcome) == (None, before)


async def test_a_load_waits_for_the_save_that_was_sent_before_it(life: Life, path: str) -> None:
    job = await life.begin(SaveWeights(name="later"), 3)
    saving = asyncio.create_task(finished(job))
    assert isinstance(await life.load(f"tinker://{life.model_id}/weights/later", seq_id=4), WeightsLoaded)
    await saving


async def test_nothing_is_kept_of_drafts_when_a_life_begins(life: Life) -> None:
    draft = life.store.begin("m", "weights", "x", 1)
    Store(str(life.store._root), life.store._scratch)
    assert not draft.parts.exists()
