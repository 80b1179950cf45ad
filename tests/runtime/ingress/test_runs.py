"""Training runs over REST."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import pytest

from tests.runtime.ingress.checkpoints import put
from tests.runtime.ingress.conftest import Wire
from tests.runtime.stand_in import Service

pytestmark = pytest.mark.usefixtures("empty_tables")


async def runs(wire: Wire, **params: Any) -> Any:
    answer = await wire.http.get("/api/v1/training_runs", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids(listed: Any) -> list[str]:
    return [run["training_run_id"] for run in listed["training_runs"]]


async def test_runs_are_listed_newest_first_page_by_page(alice: Wire, bob: Wire) -> None:
    models = [await alice.model() for _ in range(3)]
    await bob.model()
    first, second = await runs(alice, limit=2), await runs(alice, limit=2, offset=2)
    assert ids(first) == models[:0:-1]
    assert ids(second)[0] == models[0]
    assert first["cursor"] == {"offset": 0, "limit": 2, "total_count": 3}


async def test_a_run_says_what_it_is_and_what_it_has_saved(alice: Wire, service: Service) -> None:
    session = await alice.session()
    future = await alice.create_model(session, user_metadata={"a": "b"}, lora_config={"rank": 8})
    model = (await alice.result(future)).json()["model_id"]
    for age, name in ((20, "old"), (10, "new")):
        await put(service, model, f"weights/{name}", age_s=age)
    await put(service, model, "sampler_weights/s")
    run = (await alice.http.get(f"/api/v1/training_runs/{model}")).json()
    assert (run["training_run_id"], run["base_model"], run["model_owner"]) == (model, "tiny", "alice")
    assert (run["is_lora"], run["lora_rank"], run["corrupted"]) == (True, 8, False)
    assert run["user_metadata"] == {"a": "b"}
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/new"
    assert run["last_sampler_checkpoint"]["checkpoint_id"] == "sampler_weights/s"
    assert abs(datetime.fromisoformat(run["last_request_time"]).timestamp() - time.time()) < 30


async def test_a_model_that_was_never_made_is_no_run(alice: Wire) -> None:
    future = await alice.create_model(await alice.session(), base_model="gpt-5")
    await alice.error(future)
    model = future.json()["model_id"]
    assert model not in ids(await runs(alice))
    assert (await alice.http.get(f"/api/v1/training_runs/{model}")).status_code == 404


async def test_another_tenants_run_is_there_only_while_it_has_something_public(
    alice: Wire, bob: Wire, service: Service
) -> None:
    model = (
        await alice.result(await alice.create_model(await alice.session(), user_metadata={"a": "b"}))
    ).json()["model_id"]
    await put(service, model, "weights/mine")
    url = f"/api/v1/training_runs/{model}"
    for scope in ("owned", "accessible"):
        assert (await bob.http.get(url, params={"access_scope": scope})).status_code == 404
    await put(service, model, "weights/public", public=True)
    assert (await bob.http.get(url)).status_code == 404
    assert model not in ids(await runs(bob))
    assert model in ids(await runs(bob, access_scope="accessible"))
    run = (await bob.http.get(url, params={"access_scope": "accessible"})).json()
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/public"
    assert run["user_metadata"] is None


async def test_a_project_that_is_not_the_tenants_own_is_refused_by_name(alice: Wire) -> None:
    answer = await alice.http.get("/api/v1/training_runs", params={"project_id": "p"})
    assert answer.status_code == 400
    assert "project_id 'p'" in answer.json()["detail"]
    assert await runs(alice, project_id="alice") == await runs(alice)


async def test_an_unknown_scope_is_refused(alice: Wire) -> None:
    answer = await alice.http.get("/api/v1/training_runs", params={"access_scope": "all"})
    assert answer.status_code == 400
    assert "access_scope" in answer.json()["detail"]
