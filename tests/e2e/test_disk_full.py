"""A full disk below the log, and one below the snapshots: refused or failed clearly, and all goes on with room."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import tinker
import torch
from tinker import types

from bus.client import LoraConfig, connect
from bus.subjects import escape
from tests.e2e.conftest import Served, served
from tests.support import dumps, sdk
from tests.support.requests import datums
from tests.support.small_disk import SmallDisk, mounted

BY_REQUEST = pytest.mark.skipif("DISK_FULL" not in os.environ, reason="takes minutes: DISK_FULL=1")
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600), BY_REQUEST]

ADAM = types.AdamParams(learning_rate=1e-3)
SMALL = (7, 3, 11)
LARGE = (200, 180, 150)
STEPS = 4
FULL_S = 12.0
"""For so long the log's disk stays full: a publish is waited for 10 s."""


@pytest.fixture(scope="module")
def log_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallDisk]:
    with mounted(tmp_path_factory.mktemp("disk-full") / "data" / "nats", 64 * 2**20) as disk:
        yield disk


@pytest.fixture(scope="module")
def snapshot_disk(log_disk: SmallDisk) -> Iterator[SmallDisk]:
    with mounted(log_disk.folder.with_name("snapshots"), 24 * 2**20) as disk:
        yield disk


@pytest.fixture(scope="module")
def at(log_disk: SmallDisk, snapshot_disk: SmallDisk) -> Iterator[Served]:
    """A service on both disks."""
    del snapshot_disk
    yield from served(log_disk.folder.parents[1], recovery={"replay_budget_s": 0.3})


def batch(lengths: tuple[int, ...], seed: int) -> list[types.Datum]:
    tokens, inputs = datums(lengths, seed=seed)
    return [sdk.sdk_datum(t, i.tensors) for t, i in zip(tokens, inputs, strict=True)]


def trained(client: tinker.TrainingClient, steps: range) -> list[tinker.APIFuture]:
    """Steps of two calls each, sent without waiting for any."""
    sent = []
    for step in steps:
        sent.append(client.forward_backward(batch(LARGE, 2 * step), "cross_entropy"))
        sent.append(client.forward_backward(batch(SMALL, 2 * step + 1), "cross_entropy"))
        sent.append(client.optim_step(ADAM))
    return sent


def answers(sent: list[tinker.APIFuture]) -> list[object]:
    """What came back, to be compared."""
    found: list[object] = []
    for future in sent:
        answer = future.result(timeout=300)
        found.append(answer.metrics)
        if isinstance(answer, types.ForwardBackwardOutput):
            found.append([values.tolist() for values in sdk.logprobs(answer)])
    return found


def same_bits(at: Served, left: str, right: str, steps: range) -> None:
    """Gradient, weights and optimizer state of every step."""
    for step in steps:
        mine = dumps.read(at.dumps, right, step)
        for kind, tensors in dumps.read(at.dumps, left, step).items():
            for name, tensor in tensors.items():
                assert torch.equal(tensor, mine[kind][name]), (step, kind, name)


def post(at: Served, endpoint: str, body: dict[str, object]) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one request."""
    request = urllib.request.Request(
        f"{at.service.http}/api/v1/{endpoint}",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-api-key": at.service.api_key},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, dict(response.headers), response.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def step_by_hand(at: Served, model_id: str, seq_id: int) -> tuple[int, dict[str, str], bytes]:
    adam = ADAM.model_dump(exclude_none=True)
    return post(
        at,
        "optim_step",
        {"model_id": model_id, "seq_id": seq_id, "type": "optim_step", "adam_params": adam},
    )


def processes(at: Served, *names: str) -> dict[str, int]:
    """Process ids of our own parts."""
    found = {}
    for process in at.service.tree():
        title = " ".join(process.cmdline())
        found |= {name: process.pid for name in names if name in title}
    return found


def cpu_seconds(at: Served) -> float:
    total = 0.0
    for process in at.service.tree():
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


class EventClient(threading.Thread):
    """Trains the first step as an event client, and waits as long as that takes."""

    def __init__(self, at: Served, model_id: str) -> None:
        super().__init__(daemon=True)
        self.at, self.model_id = at, model_id
        self.created = threading.Event()
        self.go = threading.Event()
        self.metrics: dict[str, float] = {}

    def run(self) -> None:
        asyncio.run(self._train())

    async def _train(self) -> None:
        service = self.at.service
        async with await connect(service.nats, tenant="default", password=service.nats_password) as client:
            lora = LoraConfig(rank=8, seed=3)
            model = await client.create_model(self.model_id, base_model="tiny", lora=lora)
            model.submit_timeout_s = 300
            self.created.set()
            await asyncio.to_thread(self.go.wait)
            for lengths, seed in ((LARGE, 0), (SMALL, 1)):
                tokens, inputs = datums(lengths, seed=seed)
                data = [sdk.bus_datum(t, i.tensors) for t, i in zip(tokens, inputs, strict=True)]
                await model.forward_backward(data)
            self.metrics = (await (await model.optim_step(learning_rate=1e-3))).metrics


def test_a_full_disk_below_the_log_is_waited_out_and_nothing_is_lost(at: Served, log_disk: SmallDisk) -> None:
    undisturbed, hit, bystander = (sdk.training_client(at.service) for _ in range(3))
    events = EventClient(at, "events-on-a-full-disk")
    events.start()
    assert events.created.wait(60)
    wanted = answers(trained(undisturbed, range(STEPS)))
    parts = ("DispatcherPart", "IntakePart", "IngressPart", "ray::Rank")
    before = processes(at, *parts)

    sent = trained(hit, range(STEPS // 2))  # some of it is on the log when the disk is full, and some is not
    sent[0].result(timeout=sdk.WAIT_S)
    log_disk.fill()
    sent += trained(hit, range(STEPS // 2, STEPS))
    events.go.set()
    status, headers, body = refused(at, sdk.model_id(bystander))
    assert status == 429
    assert 0 < float(headers["retry-after"]) <= 60
    assert json.loads(body)["detail"]
    # What is stored can be read.
    status, _, body = post(at, "retrieve_future", {"request_id": f"{sdk.model_id(undisturbed)}#3"})
    assert status == 200
    assert json.loads(body)["metrics"]["step"] == 1
    log_disk.fill()
    began, used = time.monotonic(), cpu_seconds(at)
    time.sleep(FULL_S)
    used = cpu_seconds(at) - used
    assert used < 0.5 * (time.monotonic() - began), "somebody does not wait, but turns in a loop"
    with pytest.raises(TimeoutError):
        sent[-1].result(timeout=0.1)

    log_disk.make_room()
    assert answers(sent) == wanted
    events.join(300)
    assert events.metrics["window_calls"] == 2
    same_bits(at, sdk.model_id(undisturbed), sdk.model_id(hit), range(STEPS))
    same_bits(at, sdk.model_id(undisturbed), events.model_id, range(1))
    assert processes(at, *parts) == before, "nobody had to be replaced"
    assert at.service.metric("tinkerbus_replay_mismatches_total") == 0
    said = "".join(at.service.stderr)
    assert "the broker cannot store" in said
    assert "the broker stores again" in said


def refused(at: Served, model_id: str) -> tuple[int, dict[str, str], bytes]:
    """The answer to a request that the log does not take; some small ones still find room in its last block."""
    for seq_id in range(1, 200):
        answer = step_by_hand(at, model_id, seq_id)
        if answer[0] != 200:
            return answer
    raise AssertionError("the disk was never full")


def test_a_full_disk_below_the_snapshots_costs_snapshots_and_nothing_else(
    at: Served, snapshot_disk: SmallDisk
) -> None:
    undisturbed, hit = (sdk.training_client(at.service) for _ in range(2))
    wanted = answers(trained(undisturbed, range(STEPS)))
    answers(trained(hit, range(1)))
    snapshot_disk.fill()
    failed = at.service.metric("tinkerbus_snapshots_failed_total")
    done = 1
    while at.service.metric("tinkerbus_snapshots_failed_total") < failed + 2:
        answers(trained(hit, range(done, done + 1)))
        done += 1
        assert done < 60, "no snapshot was even tried"
        time.sleep(0.5)
    snapshot_disk.make_room()
    place = at.service.data / "snapshots" / "main" / escape(sdk.model_id(hit))
    before = newest(place)
    while newest(place) <= before:
        answers(trained(hit, range(done, done + 1)))
        done += 1
        assert done < 120, "no snapshot was taken"
    assert not list(place.glob("aside-*"))
    # The model is what it would have been, and its newest snapshot is one to go on from.
    same_bits(at, sdk.model_id(undisturbed), sdk.model_id(hit), range(min(STEPS, done)))
    assert len(wanted) == 5 * STEPS
    at.service.kill_tree()
    at.service.start()
    step = trained(hit, range(done, done + 1))[-1].result(timeout=300)
    assert step.metrics["step"] == done + 1
    assert at.service.metric("tinkerbus_replay_mismatches_total") == 0


def newest(place: Path) -> str:
    """The name of the newest whole snapshot; names go up. Empty while there is none."""
    return max((found.name for found in place.glob("*") if not found.name.startswith("aside-")), default="")
