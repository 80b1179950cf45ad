"""The official SDK's RestClient, unmodified, against the ingress over a real broker."""

from __future__ import annotations

import asyncio
import time
import urllib.request
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from bus.tables import SamplerRow
from tests.runtime.ingress.checkpoints import FILES, put
from tests.runtime.ingress.conftest import Wire
from tests.runtime.stand_in import Replica, Service

pytestmark = pytest.mark.usefixtures("empty_tables")

WAIT_S = 20

Call = Callable[..., Any]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_PROJECT_ID", "TINKER_TAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


@pytest.fixture
def call(ingress: Replica) -> Call:
    """A method of the client by name, as alice unless told otherwise; its result."""

    async def call(method: str, *args: Any, key: str = "tml-alice", **kwargs: Any) -> Any:
        def ask() -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # search_sessions is experimental
                client = tinker.RestClient(base_url=ingress.url, api_key=key)
                return getattr(client, method)(*args, **kwargs).result(WAIT_S)

        return await asyncio.wait_for(asyncio.to_thread(ask), 2 * WAIT_S)

    return call


async def test_runs_and_their_checkpoints(alice: Wire, service: Service, call: Call) -> None:
    models = [await alice.model() for _ in range(3)]
    await put(service, models[0], "weights/a", age_s=1)
    await put(service, models[0], "sampler_weights/b")
    page = await call("list_training_runs", limit=2)
    assert [run.training_run_id for run in page.training_runs] == models[:0:-1]
    assert (page.cursor.total_count, page.cursor.limit, page.cursor.offset) == (3, 2, 0)
    run = await call("get_training_run", models[0])
    assert (run.base_model, run.is_lora, run.lora_rank, run.model_owner) == ("tiny", True, 4, "alice")
    assert run.last_checkpoint.checkpoint_id == "weights/a"
    assert run.last_sampler_checkpoint.checkpoint_type == "sampler"
    by_path = await call("get_training_run_by_tinker_path", f"tinker://{models[0]}/weights/a")
    assert by_path.training_run_id == models[0]
    found = await call("list_checkpoints", models[0])
    assert [one.checkpoint_id for one in found.checkpoints] == ["sampler_weights/b", "weights/a"]
    every = await call("list_user_checkpoints", limit=1, offset=1)
    assert [one.tinker_path for one in every.checkpoints] == [f"tinker://{models[0]}/weights/a"]
    assert every.cursor.total_count == 2


async def test_the_life_of_a_checkpoint(alice: Wire, service: Service, call: Call) -> None:
    model = await alice.model()
    path = str(await put(service, model, "weights/a"))
    info = await call("get_weights_info_by_tinker_path", path)
    assert (info.base_model, info.lora_rank, info.train_unembed) == ("tiny", 4, False)
    with pytest.raises(tinker.NotFoundError):
        await call("get_weights_info_by_tinker_path", path, key="tml-bob")
    await call("publish_checkpoint_from_tinker_path", path)
    assert (await call("get_weights_info_by_tinker_path", path, key="tml-bob")).is_lora
    await call("unpublish_checkpoint_from_tinker_path", path)
    await call("set_checkpoint_ttl_from_tinker_path", path, 3600)
    (row,) = (await call("list_checkpoints", model)).checkpoints
    assert row.public is False
    assert 3500 < row.expires_at.timestamp() - time.time() <= 3600
    await call("set_checkpoint_ttl_from_tinker_path", path, None)
    with pytest.raises(tinker.BadRequestError, match="ttl_seconds is 60"):
        await call("set_checkpoint_ttl_from_tinker_path", path, 60)
    await call("delete_checkpoint_from_tinker_path", path)
    with pytest.raises(tinker.NotFoundError):
        await call("delete_checkpoint_from_tinker_path", path)


async def test_an_export_is_downloaded_file_by_file(
    alice: Wire, service: Service, call: Call, tmp_path: Path
) -> None:
    path = await put(service, await alice.model(), "external_weights/a")
    answer = await call("get_external_weights_urls", str(path))
    assert answer.expires.timestamp() > time.time()

    def fetch(url: str) -> bytes:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=WAIT_S) as sent:
            return bytes(sent.read())

    got = {file: await asyncio.to_thread(fetch, url) for file, url in answer.urls.items()}
    assert got == FILES


async def test_a_copy(alice: Wire, service: Service, call: Call) -> None:
    path = await put(service, await alice.model(), "weights/a")
    copied = await call("copy_weights", str(path), "alice", ttl_seconds=3600)
    run = await call("get_training_run_by_tinker_path", copied)
    assert run.last_checkpoint.tinker_path == copied
    with pytest.raises(tinker.BadRequestError, match="destination_project_id 'p' is not known"):
        await call("copy_weights", str(path), "p")
    with pytest.raises(tinker.BadRequestError, match="weights-access-token"):
        await call("copy_weights", str(path), "alice", weights_access_token="t")


async def test_sessions(alice: Wire, service: Service, call: Call) -> None:
    session = await alice.session()
    model = (await alice.result(await alice.create_model(session))).json()["model_id"]
    row = SamplerRow(tenant="alice", base_model="tiny", created_at=time.time(), session_id=session)
    await service.tables.samplers.put(f"{session}:sample:0", row)
    assert (await call("list_sessions")).sessions == [session]
    found = await call("get_session", session)
    assert (found.training_run_ids, found.sampler_ids) == ([model], [f"{session}:sample:0"])
    page = await call("search_sessions", types.SessionSearchRequest(session_id=session, limit=1))
    assert [(one.session_id, one.status.type) for one in page.sessions] == [(session, "active")]
    assert page.next_cursor is None
    with pytest.raises(tinker.BadRequestError, match="is not served by this release"):
        await call("assign_session_project", session, "p")
    with pytest.raises(tinker.BadRequestError, match="is not served by this release"):
        await call("export_session_trace", session)


async def test_a_search_goes_on_from_its_cursor(alice: Wire, call: Call) -> None:
    mine = [await alice.session() for _ in range(3)]
    seen: list[str] = []
    cursor = None
    for _ in range(3):
        page = await call("search_sessions", types.SessionSearchRequest(limit=1, cursor=cursor))
        seen += [one.session_id for one in page.sessions]
        cursor = page.next_cursor
    assert (seen, cursor) == (mine[::-1], None)
