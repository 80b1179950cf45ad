"""A save is listed whole, once, in its turn; or it fails, and leaves nothing."""

from __future__ import annotations

import asyncio
import time

import msgspec
from safetensors.torch import load_file

from bus.events import SaveWeights, SaveWeightsExternal, SaveWeightsForSampler, WeightsSaved
from bus.tables import CheckpointRow
from tests.runtime.checkpoints.conftest import Life, failed, finished


async def row(life: Life, kind: str, name: str) -> CheckpointRow | None:
    found = await life.tables.checkpoints.get((life.model_id, kind, name))
    return None if found is None else found[0]


def value(life: Life, url: str) -> float:
    with life.store.here(url) as folder:
        return float(load_file(folder / "adapter_model.safetensors")["base_model.model.x"][0, 0])


async def test_what_was_saved_is_listed_with_everything_that_its_readers_ask_for(life: Life) -> None:
    op = SaveWeights(name="x", ttl_seconds=3600, user_metadata={"k": "v"})
    outcome = await life.run(op, 3)
    found = await row(life, "weights", "x")
    assert found is not None
    assert outcome == WeightsSaved(path=f"tinker://{life.model_id}/weights/x", size_bytes=found.size_bytes)
    assert (found.tenant, found.seq_id, found.base_model, found.optimizer) == ("demo", 3, "tiny", True)
    assert found.lora is not None
    assert (found.lora.rank, found.user_metadata) == (4, {"k": "v"})
    assert found.expires_at is not None
    assert abs(found.expires_at - time.time() - 3600) < 60
    with life.store.here(found.url) as folder:
        assert sum(file.stat().st_size for file in folder.iterdir()) == found.size_bytes
        assert {file.name for file in folder.iterdir()} == {
            "adapter_config.json",
            "adapter_model.safetensors",
            "optimizer.safetensors",
            "tinkerbus.json",
        }


async def test_kinds_have_names_of_their_own(life: Life) -> None:
    await life.run(SaveWeights(name="x"), 1)
    sampler = await life.run(SaveWeightsForSampler(name="x"), 2)
    external = await life.run(SaveWeightsExternal(name="x"), 3)
    assert isinstance(sampler, WeightsSaved)
    assert isinstance(external, WeightsSaved)
    assert sampler.path == f"tinker://{life.model_id}/sampler_weights/x"
    assert external.path == f"tinker://{life.model_id}/external_weights/x"
    found = await row(life, "sampler_weights", "x")
    assert found is not None
    assert not found.optimizer


async def test_a_name_that_is_there_is_refused_unless_it_may_be_overwritten(life: Life) -> None:
    await life.run(SaveWeights(name="x"), 1)
    first = await row(life, "weights", "x")
    assert first is not None
    life.ranks.value = 2.0
    refused = failed(await life.run(SaveWeights(name="x"), 2))
    assert (refused.category, refused.field) == ("user", "name")
    assert await row(life, "weights", "x") == first
    await life.run(SaveWeights(name="x", overwrite=True), 3)
    second = await row(life, "weights", "x")
    assert second is not None
    assert value(life, second.url) == 2.0
    assert life.store.places() == {second.url}


async def test_the_same_save_again_is_the_one_that_stands(life: Life) -> None:
    first = await life.run(SaveWeights(name="x"), 1)
    life.ranks.value = 2.0
    again = await life.begin(SaveWeights(name="x"), 1)
    assert again.ranks is None
    assert again.outcome == first
    assert len(life.store.places()) == 1


async def test_of_two_saves_under_one_name_the_earlier_stands_though_its_files_come_later(life: Life) -> None:
    early = await life.begin(SaveWeights(name="x"), 1)
    assert early.ranks is not None
    await early.ranks
    life.ranks.slow.update(life.ranks.written)
    life.ranks.value = 2.0
    late = await life.begin(SaveWeights(name="x"), 2)
    both = [asyncio.create_task(finished(late)), asyncio.create_task(finished(early))]
    await asyncio.sleep(0.3)
    assert await row(life, "weights", "x") is None
    life.ranks.slow.clear()
    refused, saved = await asyncio.gather(*both)
    assert isinstance(saved, WeightsSaved)
    assert "is there already" in failed(refused).error
    found = await row(life, "weights", "x")
    assert found is not None
    assert value(life, found.url) == 1.0
    assert life.store.places() == {found.url}


async def test_a_disk_without_room_fails_the_save_and_leaves_nothing(life: Life) -> None:
    life.ranks.error = "OSError: [Errno 28] No space left on device"
    outcome = failed(await life.run(SaveWeights(name="x"), 1))
    assert outcome.category == "server"
    assert "No space left" in outcome.error
    assert await row(life, "weights", "x") is None
    assert life.store.places() == set()
    life.ranks.error = ""
    assert isinstance(await life.run(SaveWeights(name="x"), 2), WeightsSaved)


async def test_a_session_gets_weights_of_its_own(life: Life) -> None:
    session = f"{life.model_id}:sample:0"
    op = SaveWeightsForSampler(sampling_session_id=session)
    assert await life.run(op, 1) == WeightsSaved(sampling_session_id=session)
    assert await life.run(op, 1) == WeightsSaved(sampling_session_id=session)
    found = await life.tables.samplers.get(session)
    assert found is not None
    assert found[0].url is not None
    assert value(life, found[0].url) == 1.0
    assert "is taken" in failed(await life.run(op, 2)).error
    await life.keeping.sweep()
    assert found[0].url in life.store.places()


async def test_inflight_sessions_go_on_with_the_newest_weights(life: Life) -> None:
    ids = [f"{life.model_id}:sample:{n}" for n in range(3)]
    await life.run(SaveWeightsForSampler(sampling_session_id=ids[0], inflight=True), 1)
    await life.run(SaveWeightsForSampler(sampling_session_id=ids[1]), 2)
    life.ranks.value = 2.0
    await life.run(SaveWeightsForSampler(sampling_session_id=ids[2], inflight=True), 3)
    rows = [found[0] for i in ids if (found := await life.tables.samplers.get(i)) is not None]
    assert [value(life, str(r.url)) for r in rows] == [2.0, 1.0, 2.0]
    assert [r.generation for r in rows] == [1, 0, 0]


async def test_what_is_past_its_time_counts_as_gone_and_then_is(life: Life) -> None:
    await life.run(SaveWeights(name="x", ttl_seconds=60), 1)
    found = await life.tables.checkpoints.get((life.model_id, "weights", "x"))
    assert found is not None
    past = msgspec.structs.replace(found[0], expires_at=time.time() - 1)
    await life.tables.checkpoints.put((life.model_id, "weights", "x"), past)
    path = f"tinker://{life.model_id}/weights/x"
    assert failed(await life.load(path)).error == f"path {path!r} is not known"
    assert isinstance(await life.run(SaveWeights(name="x"), 2), WeightsSaved)
    await life.tables.checkpoints.put((life.model_id, "weights", "x"), past)
    await life.keeping.expire()
    assert await row(life, "weights", "x") is None
    await life.keeping.sweep()
    assert life.store.places() == set()
