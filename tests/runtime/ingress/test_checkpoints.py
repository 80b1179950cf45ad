"""Checkpoints over REST: listed newest first, readable by their owner or when public, gone once deleted or expired."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.runtime.ingress.checkpoints import folder_of, put
from tests.runtime.ingress.conftest import Wire
from tests.runtime.stand_in import Service

pytestmark = pytest.mark.usefixtures("empty_tables")


async def get(wire: Wire, path: str, **params: Any) -> Any:
    return await wire.http.get(f"/api/v1/{path}", params=params)


async def listed(wire: Wire, model: str) -> list[str]:
    answer = await get(wire, f"training_runs/{model}/checkpoints")
    assert answer.status_code == 200, answer.text
    return [row["checkpoint_id"] for row in answer.json()["checkpoints"]]


async def test_a_runs_checkpoints_are_listed_newest_first_and_described(
    alice: Wire, service: Service
) -> None:
    model = await alice.model()
    await put(service, model, "weights/a", age_s=20)
    await put(service, model, "sampler_weights/a", age_s=10, user_metadata={"step": "3"})
    await put(service, model, "external_weights/a", size_bytes=7)
    answer = (await get(alice, f"training_runs/{model}/checkpoints")).json()["checkpoints"]
    assert [(row["checkpoint_id"], row["checkpoint_type"]) for row in answer] == [
        ("external_weights/a", "external"),
        ("sampler_weights/a", "sampler"),
        ("weights/a", "training"),
    ]
    assert (answer[0]["size_bytes"], answer[0]["tinker_path"]) == (7, f"tinker://{model}/external_weights/a")
    assert answer[1]["user_metadata"] == {"step": "3"}
    assert answer[2]["expires_at"] is None
    assert answer[2]["public"] is False


async def test_pages_of_all_checkpoints_cover_each_once(alice: Wire, bob: Wire, service: Service) -> None:
    first, second, other = await alice.model(), await alice.model(), await bob.model()
    for place in range(5):
        await put(service, (first, second)[place % 2], f"weights/{place}", age_s=place)
    await put(service, other, "weights/x", "bob")
    seen: list[str] = []
    for offset in (0, 2, 4, 6):
        page = (await get(alice, "checkpoints", limit=2, offset=offset)).json()
        assert page["cursor"] == {"offset": offset, "limit": 2, "total_count": 5}
        seen += [row["checkpoint_id"] for row in page["checkpoints"]]
    assert seen == [f"weights/{place}" for place in range(5)]


@pytest.mark.parametrize("params", [{"limit": 0}, {"limit": 1001}, {"offset": -1}, {"limit": "many"}])
async def test_a_page_out_of_range_is_refused_by_name(alice: Wire, params: dict[str, Any]) -> None:
    answer = await get(alice, "checkpoints", **params)
    assert answer.status_code == 400
    assert next(iter(params)) in answer.json()["detail"]


async def test_a_deleted_checkpoint_is_gone_with_its_folder(alice: Wire, service: Service) -> None:
    model = await alice.model()
    path, kept = await put(service, model, "weights/a"), await put(service, model, "weights/b")
    url = f"/api/v1/training_runs/{model}/checkpoints/weights/a"
    assert (await alice.http.delete(url)).status_code == 200
    assert await listed(alice, model) == ["weights/b"]
    assert not folder_of(service, path).exists()
    assert folder_of(service, kept).exists()
    assert (await alice.http.delete(url)).status_code == 404


async def test_an_expired_checkpoint_counts_as_deleted(alice: Wire, service: Service) -> None:
    model = await alice.model()
    path = await put(service, model, "weights/a", expires_at=time.time() + 1.0, public=True)
    assert await listed(alice, model) == ["weights/a"]
    await asyncio.sleep(1.1)
    assert await listed(alice, model) == []
    assert (await get(alice, "checkpoints")).json()["cursor"]["total_count"] == 0
    assert (await alice.post("weights_info", {"tinker_path": str(path)})).status_code == 404
    assert (
        await alice.http.delete(f"/api/v1/training_runs/{model}/checkpoints/weights/a")
    ).status_code == 404


async def test_a_published_checkpoint_is_readable_by_all_and_writable_by_its_owner(
    alice: Wire, bob: Wire, service: Service
) -> None:
    model = await alice.model()
    path = await put(service, model, "weights/a")
    await put(service, model, "weights/secret", user_metadata={"a": "b"})
    url = f"/api/v1/training_runs/{model}/checkpoints/weights/a"
    info = {"tinker_path": str(path)}
    assert (await bob.post("weights_info", info)).status_code == 404
    for _ in range(2):  # a repetition whose answer was lost
        assert (await alice.http.post(f"{url}/publish")).status_code == 200
    assert (await bob.post("weights_info", info)).json() == {
        "base_model": "tiny",
        "is_lora": True,
        "lora_rank": 4,
        "train_unembed": False,
        "train_mlp": True,
        "train_attn": True,
        "optimizer_config": {"type": "adamw"},
    }
    assert await listed(bob, model) == ["weights/a"]
    assert (await get(bob, "checkpoints")).json()["checkpoints"] == []
    refused = [
        await bob.http.delete(url),
        await bob.http.post(f"{url}/publish"),
        await bob.http.delete(f"{url}/publish"),
        await bob.http.put(f"{url}/ttl", json={"ttl_seconds": 3600}),
    ]
    assert [answer.status_code for answer in refused] == [404] * 4
    assert (await alice.http.delete(f"{url}/publish")).status_code == 200
    assert (await bob.post("weights_info", info)).status_code == 404
    assert (await get(bob, f"training_runs/{model}/checkpoints")).status_code == 404


async def test_ttl_is_set_from_now_on_and_taken_back(alice: Wire, service: Service) -> None:
    model = await alice.model()
    path = await put(service, model, "weights/a")
    url = f"/api/v1/training_runs/{model}/checkpoints/weights/a/ttl"
    before = time.time()
    assert (await alice.http.put(url, json={"ttl_seconds": 7200})).status_code == 200
    found = await service.tables.checkpoints.get(path)
    assert found is not None
    assert before + 7200 <= (found[0].expires_at or 0) <= time.time() + 7200
    assert (await alice.http.put(url, json={"ttl_seconds": None})).status_code == 200
    found = await service.tables.checkpoints.get(path)
    assert found is not None
    assert found[0].expires_at is None


@pytest.mark.parametrize("ttl", [0, 3599, 10 * 365 * 86400 + 1, "long", True, 3600.5])
async def test_a_ttl_out_of_range_is_refused_by_name(alice: Wire, service: Service, ttl: Any) -> None:
    model = await alice.model()
    await put(service, model, "weights/a")
    answer = await alice.http.put(
        f"/api/v1/training_runs/{model}/checkpoints/weights/a/ttl", json={"ttl_seconds": ttl}
    )
    assert answer.status_code == 400
    assert "ttl_seconds" in answer.json()["detail"]


@pytest.mark.parametrize(
    "checkpoint_id", ["a", "weights", "weights/", "weights/a/b", "nonsense/a", "weights/.."]
)
async def test_a_checkpoint_id_of_another_form_never_touches_a_folder(
    alice: Wire, service: Service, checkpoint_id: str
) -> None:
    model = await alice.model()
    path = await put(service, model, "weights/a")
    answer = await alice.http.delete(f"/api/v1/training_runs/{model}/checkpoints/{checkpoint_id}")
    assert answer.status_code in (400, 404, 405)
    assert folder_of(service, path).exists()


@pytest.mark.parametrize("path", ["", "x", "tinker://a", "tinker://a/weights", "tinker://a/nonsense/b", 5])
async def test_weights_info_of_a_malformed_path_is_a_400(alice: Wire, path: Any) -> None:
    answer = await alice.post("weights_info", {"tinker_path": path})
    assert answer.status_code == 400
    assert answer.json()["detail"]
