"""copy_weights: one copy for each request however often it is sent, in a run that takes no operations."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from runtime.checkpoints import folder as checkpoint_folder
from runtime.checkpoints import paths
from tests.runtime.ingress.checkpoints import FILES, files_in, folder_of, folders_of, put
from tests.runtime.ingress.conftest import Wire
from tests.runtime.stand_in import Service


async def copy(wire: Wire, source: object, key: str | None = None, **fields: Any) -> Any:
    body = {"source_path": str(source), **fields}
    return await wire.post("copy_weights", body, headers={"x-idempotency-key": key} if key else {})


async def test_a_copy_outlives_its_source(alice: Wire, service: Service) -> None:
    model = await alice.model()
    source = await put(service, model, "weights/a", user_metadata={"a": "b"}, expires_at=4e9)
    answer = await copy(alice, source, destination_project_id="alice")
    path = paths.parse(answer.json()["tinker_path"])
    assert (path.kind, path.name) == ("weights", "a")
    assert path.model_id != model
    await alice.http.delete(f"/api/v1/training_runs/{model}/checkpoints/weights/a")
    found = await service.tables.checkpoints.get(path)
    assert found is not None
    assert (found[0].expires_at, found[0].user_metadata, found[0].public) == (None, {"a": "b"}, False)
    assert files_in(found[0].url) == FILES
    assert not folder_of(service, source).exists()
    run = (await alice.http.get(f"/api/v1/training_runs/{path.model_id}")).json()
    assert run["last_checkpoint"]["tinker_path"] == str(path)


async def test_the_same_request_again_names_the_same_copy(alice: Wire, service: Service) -> None:
    source = await put(service, await alice.model(), "sampler_weights/a")
    asked = [copy(alice, source, "key-1", destination_project_id="alice") for _ in range(5)]
    named = {answer.json()["tinker_path"] for answer in await asyncio.gather(*asked)}
    assert len(named) == 1
    other = await copy(alice, source, "key-2", destination_project_id="alice")
    assert other.json()["tinker_path"] not in named
    run = paths.parse(named.pop()).model_id
    assert folders_of(service, run) == 1, "tries that lost leave no folder"


async def test_a_copy_into_a_session_takes_a_number_there(alice: Wire, service: Service) -> None:
    session = await alice.session()
    taken = (await alice.result(await alice.create_model(session, 0))).json()["model_id"]
    source = await put(service, taken, "weights/a")
    answer = await copy(alice, source, session_id=session, model_seq_id=1)
    assert answer.json()["tinker_path"] == f"tinker://{session}:train:1/weights/a"
    refused = await copy(alice, source, session_id=session, model_seq_id=0)
    assert refused.status_code == 400
    assert f"model_id '{session}:train:0' is taken" in refused.json()["detail"]


async def test_the_run_of_a_copy_takes_no_operations(alice: Wire, service: Service) -> None:
    session = await alice.session()
    source = await put(service, await alice.model(), "weights/a")
    await copy(alice, source, session_id=session, model_seq_id=1)
    for answer in (await alice.optim_step(f"{session}:train:1", 1), await alice.create_model(session, 1)):
        assert answer.status_code == 400
        assert "is the run of a copy" in answer.json()["detail"]


async def test_anothers_checkpoint_is_copied_only_while_it_is_public(
    alice: Wire, bob: Wire, service: Service
) -> None:
    model = await alice.model()
    source = await put(service, model, "weights/a")
    assert (await copy(bob, source, destination_project_id="bob")).status_code == 404
    await alice.http.post(f"/api/v1/training_runs/{model}/checkpoints/weights/a/publish")
    path = paths.parse((await copy(bob, source, destination_project_id="bob")).json()["tinker_path"])
    found = await service.tables.checkpoints.get(path)
    assert found is not None
    assert (found[0].tenant, found[0].public) == ("bob", False)
    assert (await alice.post("weights_info", {"tinker_path": str(path)})).status_code == 404


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "destination_project_id is missing"),
        ({"destination_project_id": "p"}, "destination_project_id 'p' is not known"),
        ({"destination_project_id": "alice", "ttl_seconds": 5}, "ttl_seconds is 5"),
        ({"destination_project_id": "alice", "session_id": "s"}, "are both given"),
        ({"session_id": "s"}, "model_seq_id is missing"),
        ({"destination_project_id": "alice", "weights_access_token": "t"}, "weights_access_token"),
    ],
)
async def test_a_copy_that_cannot_be_honoured_is_refused_by_name(
    alice: Wire, service: Service, fields: dict[str, Any], says: str
) -> None:
    source = await put(service, await alice.model(), "weights/a")
    answer = await copy(alice, source, **fields)
    assert answer.status_code == 400
    assert says in answer.json()["detail"]


async def test_a_disk_without_room_asks_for_another_try_and_leaves_nothing(
    alice: Wire, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await put(service, await alice.model(), "weights/a")

    def full(_: str, target: str) -> None:
        Path(target).mkdir(parents=True)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_folder, "copy", full)
    answer = await copy(alice, source, "key", destination_project_id="alice")
    assert answer.status_code == 429
    assert "No space left on device" in answer.json()["detail"]
    monkeypatch.undo()
    path = paths.parse(
        (await copy(alice, source, "key", destination_project_id="alice")).json()["tinker_path"]
    )
    assert folders_of(service, path.model_id) == 1
