"""Sampling over the wire: the real sampler process's server around an engine that counts."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from tinker.proto.response_conv import deserialize_sample_response

from bus.connection import connect
from bus.events import Sampled, SampledSequence, Tensor
from bus.results import Results
from bus.tables import CheckpointRow, Tables
from observability.recorder import Recorder
from runtime.config import Sampler
from runtime.ingress import sample_futures
from runtime.sampler import asking
from runtime.sampler.contract import Finished, SampleRequest, SamplingRefused
from runtime.sampler.server import SamplerServer
from tests.bus.waiting import until
from tests.runtime.ingress.conftest import Wire
from tests.runtime.stand_in import BASE_MODEL, CONTEXT, Service, running


class CountingEngine:
    """Generates 0, 1, 2 … with logprob −1, all of it in one step, while `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.queue: list[SampleRequest] = []
        self.ran: list[SampleRequest] = []
        self.cancelled: list[str] = []
        self.tokens = 0
        self.running = 0

    def weights(self, request: SampleRequest) -> str:
        if request.url == "file:///gone":
            raise SamplingRefused("the weights at file:///gone are gone", "server")
        return request.url or "base"

    def add(self, request: SampleRequest, weights: str) -> None:
        self.queue.append(request)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        self.queue = [one for one in self.queue if one.request_id != request_id]

    @property
    def waiting(self) -> int:
        return len(self.queue)

    @property
    def idle(self) -> bool:
        return not self.queue

    def step(self) -> list[Finished]:
        if not self.go.wait(0.01):
            return []
        done, self.queue = self.queue, []
        self.ran += done
        return [Finished(one.request_id, counted(one)) for one in done]


def counted(request: SampleRequest) -> Sampled:
    import struct

    n = request.max_tokens
    sequence = SampledSequence(
        tokens=Tensor(dtype="int32", shape=(n,), data=struct.pack(f"<{n}i", *range(n))),
        logprobs=Tensor(dtype="float32", shape=(n,), data=struct.pack(f"<{n}f", *[-1.0] * n)),
        stop_reason="length",
    )
    return Sampled(sequences=(sequence,) * request.num_samples)


@dataclass
class Process:
    """One sampler process, in all but the process."""

    engine: CountingEngine
    stop: Callable[[], Any] = field(repr=False)


@contextlib.asynccontextmanager
async def sampler_process(service: Service, name: str, **settings: Any) -> AsyncIterator[Process]:
    engine = CountingEngine()
    async with await connect(service.broker_url, service.credentials, name="sampler") as bus:
        tables = await Tables.open(bus)
        server = SamplerServer(
            bus,
            service.group,
            name,
            Sampler(**settings),
            tables.samples,
            Results(bus),
            Recorder(name, group=service.group),
            lambda: engine,
        )
        async with running(server.run()):
            await asyncio.sleep(0)
            await until(lambda: asking.tell(service.bus, service.group, name, asking.Order()))
            yield Process(engine, bus.close)


@pytest.fixture
async def process(service: Service) -> AsyncIterator[Process]:
    async with sampler_process(service, "sampler-1", max_waiting=2) as started:
        yield started


async def session(wire: Wire, **changes: Any) -> str:
    body = {"session_id": await wire.session(), "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    response = await wire.post("create_sampling_session", {**body, **changes})
    assert response.status_code == 200, response.text
    return str(response.json()["sampling_session_id"])


def body(sampler: str, seq_id: int = 0, **changes: Any) -> dict[str, Any]:
    params = {"max_tokens": 3, "temperature": 1.0, "top_k": -1, "top_p": 1.0, **changes.pop("params", {})}
    return {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3, 4]}]},
        "sampling_params": params,
        "type": "sample",
        **changes,
    }


async def test_a_request_gets_its_ids_at_once_and_its_samples_as_protobuf(alice, process) -> None:
    sampler = await session(alice)
    future = await alice.post("asample", body(sampler, 935936180000000000, num_samples=2))
    assert future.json() == {
        "request_id": f"{sampler}#s935936180000000000",
        "model_id": sampler,
        "sample_sequence_ids": [f"{sampler}#s935936180000000000/{i}" for i in (0, 1)],
    }
    result = await alice.result(future)
    assert "application/x-protobuf" in result.headers["content-type"]
    response = deserialize_sample_response(result.content)
    assert [list(sequence.tokens) for sequence in response.sequences] == [[0, 1, 2]] * 2
    assert [list(sequence.logprobs) for sequence in response.sequences] == [[-1.0] * 3] * 2


async def test_the_same_request_again_runs_once_whatever_its_state(alice, process) -> None:
    sampler = await session(alice)
    process.engine.go.clear()
    first, again = [await alice.post("asample", body(sampler)) for _ in range(2)]
    process.engine.go.set()
    await alice.result(first)
    late = await alice.post("asample", body(sampler))
    assert first.json() == again.json() == late.json()
    await alice.result(late)
    assert len(process.engine.ran) == 1


async def test_a_session_of_a_number_is_made_once_and_described(alice, process) -> None:
    owner = await alice.session()
    sampler = await session(alice, session_id=owner)
    assert sampler == await session(alice, session_id=owner) == f"{owner}:sample:0"
    described = await alice.http.get(f"/api/v1/samplers/{sampler}")
    assert described.json() == {"sampler_id": sampler, "base_model": BASE_MODEL, "model_path": None}
    joined = [await alice.post("join_sampling_session", {"sampling_session_id": sampler}) for _ in range(2)]
    assert [response.json()["client_counter"] for response in joined] == [1, 2]


async def test_a_path_is_served_to_its_owner_and_to_all_only_once_it_is_public(
    alice, bob, service, process
) -> None:
    path = "tinker://run:train:0/sampler_weights/step-1"
    row = CheckpointRow(
        tenant="alice", seq_id=1, url="file:///weights", base_model=BASE_MODEL, created_at=1.0, size_bytes=1
    )
    key = ("run:train:0", "sampler_weights", "step-1")
    await service.tables.checkpoints.put(key, row)
    sampler = await session(alice, base_model=None, model_path=path)
    await alice.result(await alice.post("asample", body(sampler)))
    assert process.engine.ran[-1].url == "file:///weights"
    asked = {"session_id": await bob.session(), "sampling_session_seq_id": 0, "model_path": path}
    refused = await bob.post("create_sampling_session", asked)
    assert (refused.status_code, refused.json()["detail"]) == (404, f"model_path {path!r} is not known")
    await service.tables.checkpoints.put(key, msgspec.structs.replace(row, public=True))
    assert (await bob.post("create_sampling_session", asked)).status_code == 200
    await service.tables.checkpoints.put(key, msgspec.structs.replace(row, expires_at=time.time() - 1))
    expired = await alice.post(
        "create_sampling_session",
        {**asked, "session_id": await alice.session(), "sampling_session_seq_id": 1},
    )
    assert (expired.status_code, expired.json()["detail"]) == (404, f"model_path {path!r} has expired")


@pytest.mark.parametrize(
    ("asked", "status", "word"),
    [
        ({"base_model": "other"}, 400, "base_model 'other' is not served here"),
        ({"base_model": None}, 400, "both missing"),
        ({"model_path": "tinker://run/sampler_weights/nowhere"}, 404, "nowhere' is not known"),
        ({"model_path": "tinker://run/external_weights/x"}, 400, "kind external_weights"),
        ({"model_path": "tinker://run"}, 400, "is not a checkpoint's"),
    ],
)
async def test_what_is_not_there_is_refused_and_never_the_base_model(
    alice, process, asked, status, word
) -> None:
    request = {"session_id": await alice.session(), "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    sent = {name: value for name, value in {**request, **asked}.items() if value is not None}
    response = await alice.post("create_sampling_session", sent)
    assert response.status_code == status
    assert word in response.json()["detail"]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"prompt": {"chunks": []}}, "prompt holds no token"),
        (
            {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [320]}]}},
            "token 320; it must be from 0 to 319",
        ),
        ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, "type 'image'"),
        ({"prompt": {"chunks": [{"type": "image_asset_pointer", "location": ""}]}}, "'image_asset_pointer'"),
        ({"prompt": {"chunks": [{"type": "dmel", "dmel": ""}]}}, "type 'dmel'"),
        ({"record_stability_info": True}, "record_stability_info is true"),
        ({"params": {"max_tokens": CONTEXT}}, f"max_tokens is {CONTEXT}; it must be from 1 to {CONTEXT - 4}"),
        ({"params": {"temperature": -1}}, "temperature is -1"),
        ({"params": {"top_k": 0}}, "top_k is 0"),
        ({"params": {"top_p": 0}}, "top_p is 0"),
        ({"params": {"stop": [""]}}, "empty text"),
        ({"params": {"logit_bias": 1}}, "logit_bias is not a field"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"topk_prompt_logprobs": 321}, "topk_prompt_logprobs is 321; it must be from 0 to 320"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 4}, "prompt_logprobs_last_n is 4"),
        (
            {"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}},
            "target_prompt_logprobs.shape is [1, 1]; it must be [3, K]",
        ),
        (
            {"target_prompt_logprobs": {"data": [-1] * 3, "dtype": "int64", "shape": [3, 1]}},
            "names no token",
        ),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(alice, process, changes, word) -> None:
    response = await alice.post("asample", body(await session(alice), **changes))
    assert response.status_code == 400
    assert word in response.json()["detail"]


async def test_stops_and_defaults_reach_the_engine(alice, process) -> None:
    sampler = await session(alice)
    for number, stop in enumerate([None, [], "end", ["a", "b"], [5, 6]]):
        params = {"stop": stop} if stop is not None else {}
        await alice.result(await alice.post("asample", body(sampler, number, params=params)))
    found = [(one.stop_at_eos, one.stop_tokens, one.stop_texts) for one in process.engine.ran]
    assert found == [
        (True, (), ()),
        (False, (), ()),
        (True, (), ("end",)),
        (True, (), ("a", "b")),
        (True, (5, 6), ()),
    ]
    without = body(sampler, 9)
    del without["sampling_params"]["max_tokens"]
    await alice.result(await alice.post("asample", without))
    assert process.engine.ran[-1].max_tokens == CONTEXT - 4


async def test_another_tenants_session_is_one_that_does_not_exist(alice, bob, process) -> None:
    sampler = await session(alice)
    future = await alice.post("asample", body(sampler))
    await alice.result(future)
    assert (await bob.post("asample", body(sampler, 1))).status_code == 404
    assert (await bob.post("join_sampling_session", {"sampling_session_id": sampler})).status_code == 404
    assert (await bob.http.get(f"/api/v1/samplers/{sampler}")).status_code == 404
    assert (await bob.poll(future.json()["request_id"])).status_code == 410
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
    assert (await bob.post("retrieve_futures", {"target": target})).status_code == 404
    process.engine.go.clear()
    pending = await alice.post("asample", body(sampler, 2))
    await bob.post("cancel_future", {"request_id": pending.json()["request_id"]})
    process.engine.go.set()
    assert (await alice.result(pending)).status_code == 200


async def test_a_finished_session_samples_no_more(alice, process) -> None:
    owner = await alice.session()
    sampler = await session(alice, session_id=owner)
    await alice.post(f"sessions/{owner}/finish", {"reason": {"type": "success"}})
    assert (await alice.post("asample", body(sampler))).status_code in (404, 410)


async def test_too_many_waiting_requests_get_429_and_nothing_is_lost(alice, process) -> None:
    """The limit is two."""
    sampler = await session(alice)
    process.engine.go.clear()
    taken = [await alice.post("asample", body(sampler, number)) for number in range(2)]
    await until(lambda: asyncio.sleep(0, process.engine.waiting == 2))
    refused = await alice.post("asample", body(sampler, 2))
    assert refused.status_code == 429
    assert refused.json()["queue_state"] == "paused_capacity"
    assert 0 < float(refused.headers["retry-after"]) <= 60
    process.engine.go.set()
    for future in taken:
        await alice.result(future)
    await alice.result(await alice.post("asample", body(sampler, 2)))


async def test_a_cancelled_request_frees_its_place_and_fails(alice, process) -> None:
    sampler = await session(alice)
    process.engine.go.clear()
    future = await alice.post("asample", body(sampler))
    request_id = future.json()["request_id"]
    await until(lambda: asyncio.sleep(0, process.engine.waiting == 1))
    assert (await alice.post("cancel_future", {"request_id": request_id})).status_code == 200
    assert await alice.error(future) == "the request was cancelled"
    await until(lambda: asyncio.sleep(0, process.engine.waiting == 0))
    process.engine.go.set()
    assert process.engine.cancelled == [request_id]


async def test_weights_that_are_gone_fail_the_request(alice, service, process) -> None:
    sampler = await session(alice)
    await service.tables.samplers.change(
        sampler, lambda row: msgspec.structs.replace(row, url="file:///gone")
    )
    result = await alice.result(await alice.post("asample", body(sampler)))
    assert result.json() == {"error": "the weights at file:///gone are gone", "category": "server"}


async def test_a_request_that_died_with_its_sampler_is_gone_and_may_be_asked_again(
    alice, service, monkeypatch
) -> None:
    monkeypatch.setattr(asking, "LOOK_EVERY_S", 0.02)
    sampler = await session(alice)
    async with sampler_process(service, "sampler-dies") as first:
        first.engine.go.clear()
        future = await alice.post("asample", body(sampler))
        assert (await alice.poll(future.json()["request_id"])).status_code == 408
        await first.stop()
        first.engine.go.set()
        assert (await alice.settled(future.json()["request_id"])).status_code == 410
    assert (await alice.post("asample", body(sampler))).status_code == 429  # nobody is there
    async with sampler_process(service, "sampler-next") as second:
        assert (await alice.result(await alice.post("asample", body(sampler)))).status_code == 200
        assert len(second.engine.ran) == 1


async def test_a_result_that_was_never_asked_for_is_gone(alice, process) -> None:
    sampler = await session(alice)
    assert (await alice.poll(f"{sampler}#s77")).status_code == 410


async def test_all_answers_of_a_client_are_told_together_from_a_cursor_on(alice, process) -> None:
    sampler = await session(alice)
    clone = 7_000_000_000
    futures = [await alice.post("asample", body(sampler, number)) for number in (0, clone, 1)]
    for future in futures:
        await alice.result(future)
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
    asked = {"target": target, "prev_cursor": 0, "retrieved_request_ids": []}
    told = (await alice.post("retrieve_futures", asked)).json()
    assert {one["request_id"] for one in told["completions"]} == {f"{sampler}#s0", f"{sampler}#s1"}
    assert {one["state"] for one in told["completions"]} == {"finished"}
    rest = await alice.post("retrieve_futures", {**asked, "prev_cursor": told["cursor"], "timeout": 0.0})
    assert rest.json() == {"completions": [], "cursor": told["cursor"]}


async def test_lost_requests_are_told_as_failed(alice, service, monkeypatch) -> None:
    monkeypatch.setattr(asking, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(sample_futures, "LOOK_EVERY_S", 0.05)
    sampler = await session(alice)
    async with sampler_process(service, "sampler-dies") as first:
        first.engine.go.clear()
        await alice.post("asample", body(sampler))
        await first.stop()
        first.engine.go.set()
        target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
        told = (await alice.post("retrieve_futures", {"target": target, "prev_cursor": 0})).json()
    assert told["completions"] == [{"state": "failed", "request_id": f"{sampler}#s0"}]


async def test_a_server_that_only_trains_says_so(alice, service) -> None:
    settings = msgspec.structs.replace(service.settings, sampler=Sampler(replicas=0))
    replica = await service.replica(settings)
    asked = {"session_id": await alice.session(), "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    headers = {"x-api-key": "tml-alice"}
    response = await alice.http.post(
        f"{replica.url}/api/v1/create_sampling_session", json=asked, headers=headers
    )
    assert response.status_code == 400
    assert "sampler.replicas is 0" in response.json()["detail"]
