"""Sessions listed, described and searched."""

from __future__ import annotations

import time
from typing import Any

import pytest

from bus.tables import SamplerRow
from tests.runtime.ingress.checkpoints import put
from tests.runtime.ingress.conftest import Wire
from tests.runtime.stand_in import Service

pytestmark = pytest.mark.usefixtures("empty_tables")


async def opened(wire: Wire, **fields: Any) -> str:
    return str((await wire.post("create_session", fields)).json()["session_id"])


async def search(wire: Wire, **wanted: Any) -> Any:
    answer = await wire.post("sessions/search", wanted)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids(found: Any) -> list[str]:
    return [row["session_id"] for row in found["sessions"]]


async def test_sessions_are_listed_newest_first(alice: Wire, bob: Wire) -> None:
    mine = [await alice.session() for _ in range(3)]
    await bob.session()
    answer = await alice.http.get("/api/v1/sessions", params={"limit": 2, "offset": 1})
    assert answer.json() == {"sessions": [mine[1], mine[0]]}


async def test_a_session_names_its_runs_and_samplers(alice: Wire, bob: Wire, service: Service) -> None:
    session = await opened(alice, user_metadata={"a": "b"}, display_name="mine")
    model = (await alice.result(await alice.create_model(session))).json()["model_id"]
    for name, whose in (("x", session), ("y", "other")):
        row = SamplerRow(tenant="alice", base_model="tiny", created_at=time.time(), session_id=whose)
        await service.tables.samplers.put(f"{session}:{name}", row)
    assert (await alice.http.get(f"/api/v1/sessions/{session}")).json() == {
        "training_run_ids": [model],
        "sampler_ids": [f"{session}:x"],
        "user_metadata": {"a": "b"},
        "display_name": "mine",
    }
    for scope in ("owned", "accessible"):
        foreign = await bob.http.get(f"/api/v1/sessions/{session}", params={"access_scope": scope})
        assert foreign.status_code == 404


async def test_a_search_pages_through_each_match_once(alice: Wire) -> None:
    mine = [await opened(alice, user_metadata={"run": "pages"}) for _ in range(5)]
    seen: list[str] = []
    cursor = None
    for _ in range(3):
        wanted = {"user_metadata": {"run": "pages"}, "limit": 2, **({"cursor": cursor} if cursor else {})}
        page = await search(alice, **wanted)
        seen += ids(page)
        cursor = page["next_cursor"]
    assert seen == mine[::-1]
    assert cursor is None


async def test_a_search_finds_by_name_id_metadata_and_status(alice: Wire, bob: Wire) -> None:
    tag = {"user_metadata": {"test": "finds"}}
    red = await opened(alice, display_name="The Red run", user_metadata={"test": "finds", "n": "1"})
    blue = await opened(alice, display_name="the blue run", **tag)
    await opened(bob, display_name="red run", **tag)
    await alice.post(f"sessions/{blue}/finish", {"reason": {"type": "errored"}, "detail": "boom"})
    assert ids(await search(alice, display_name="RUN red", **tag)) == [red]
    assert ids(await search(alice, display_name="blue", session_id=red, **tag)) == [blue, red]
    assert ids(await search(alice, session_id=red)) == [red]
    assert ids(await search(alice, user_metadata={"test": "finds", "n": "1"})) == [red]
    assert ids(await search(alice, statuses=[{"type": "active"}], **tag)) == [red]
    ended = await search(alice, statuses=[{"type": "client_finished", "reasons": ["errored"]}], **tag)
    assert ids(ended) == [blue]
    assert ended["sessions"][0]["status"] == {
        "type": "client_finished",
        "reason": {"type": "errored"},
        "detail": "boom",
    }
    assert (
        ids(await search(alice, statuses=[{"type": "client_finished", "reasons": ["success"]}], **tag)) == []
    )
    assert ids(await search(alice, statuses=[{"type": "cancelled"}, {"type": "failed"}], **tag)) == []
    assert ids(await search(alice, owner={"type": "accessible"}, **tag)) == [blue, red]
    assert ids(await search(alice, owner={"type": "user", "owner_urns": ["alice"]}, **tag)) == [blue, red]
    assert ids(await search(alice, owner={"type": "user", "owner_urns": ["bob"]}, **tag)) == []


async def test_a_summary_counts_the_checkpoints_of_its_models(alice: Wire, service: Service) -> None:
    session = await opened(alice)
    model = (await alice.result(await alice.create_model(session))).json()["model_id"]
    await put(service, model, "weights/a", size_bytes=5)
    await put(service, model, "sampler_weights/a", size_bytes=7)
    (row,) = (await search(alice, session_id=session))["sessions"]
    assert (row["checkpoints_count"], row["checkpoint_storage_bytes"]) == (2, 12)
    assert (row["owner"], row["project_id"], row["status"]) == ("alice", "alice", {"type": "active"})


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({"project_ids": ["p"]}, "project_ids"),
        ({"display_name": ""}, "display_name"),
        ({"statuses": []}, "statuses"),
        ({"statuses": [{"type": "lost"}]}, "statuses"),
        ({"limit": 201}, "limit"),
        ({"owner": {"type": "user"}}, "owner"),
        ({"cursor": {"last_created_at": "2026-01-01T00:00:00", "last_session_id": "s"}}, "cursor"),
        ({"colour": "red"}, "colour"),
    ],
)
async def test_a_search_that_cannot_be_honoured_is_refused_by_name(
    alice: Wire, wanted: dict[str, Any], field: str
) -> None:
    answer = await alice.post("sessions/search", wanted)
    assert answer.status_code == 400
    assert field in answer.json()["detail"]


async def test_a_project_and_a_trace_are_refused_by_name(alice: Wire) -> None:
    session = await alice.session()
    project = await alice.http.put(f"/api/v1/sessions/{session}/project", json={"project_id": "p"})
    trace = await alice.http.get(f"/api/v1/sessions/{session}/trace_export")
    assert [project.status_code, trace.status_code] == [400, 400]
    assert "is not served by this release" in project.json()["detail"]
    assert "is not served by this release" in trace.json()["detail"]
