"""Ranks that stop or die, again and again: every request has its answer, and what was not at fault is not touched."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tinker
import torch
from tinker import types

from bus import lease
from bus.broker_config import SERVER_USER
from bus.connection import Credentials, connect
from bus.lease import Lease, LeaseRow
from bus.tables import Table
from tests.e2e.conftest import Served, served
from tests.support import dumps, mutants, sdk
from tests.support.requests import datums

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

ADAM = types.AdamParams(learning_rate=1e-3)
POISON = 13
"""Datums of the request that kills a rank, see `tests.support.mutants`."""


@dataclass(frozen=True)
class Poisoned:
    at: Served
    file: Path
    """While it says so, the poison kills."""


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Poisoned]:
    folder = tmp_path_factory.mktemp("poisoned")
    file = folder / "mutant"
    for at in served(
        folder,
        environment=mutants.environment(file),
        packing={"max_datums_per_microbatch": 1},
        recovery={"heartbeat_timeout_s": 4},
    ):
        yield Poisoned(at, file)


def batch(size: int, seed: int) -> list[types.Datum]:
    tokens, inputs = datums((5,) * size, seed=seed)
    return [sdk.sdk_datum(t, i.tensors) for t, i in zip(tokens, inputs, strict=True)]


def rank(at: Served) -> int:
    """The process of the one rank."""
    (found,) = [p.pid for p in at.service.tree() if "ray::Rank" in " ".join(p.cmdline())]
    return found


def metric(at: Served, name: str) -> float:
    with urllib.request.urlopen(at.service.metrics, timeout=10) as answer:
        page = answer.read().decode()
    return sum(map(float, re.findall(rf"^{name}{{.*}} (\S+)$", page, re.MULTILINE)))


def gradient(at: Served, client: tinker.TrainingClient, step: int) -> torch.Tensor:
    return dumps.vector(dumps.read(at.dumps, sdk.model_id(client), step)["gradient"])


def test_an_operation_that_kills_the_ranks_every_time_is_given_up_and_the_model_goes_on(
    poisoned: Poisoned,
) -> None:
    at = poisoned.at
    poisoned.file.write_text("poison of 13 datums")
    try:
        undisturbed, hit, neighbour = (sdk.training_client(at.service) for _ in range(3))
        before = hit.forward_backward(batch(2, 1), "cross_entropy")
        poison = hit.forward_backward(batch(POISON, 2), "cross_entropy")
        behind = hit.forward_backward(batch(2, 3), "cross_entropy")
        step = hit.optim_step(ADAM)
        neighbour.forward_backward(batch(2, 4), "cross_entropy")
        assert neighbour.optim_step(ADAM).result(timeout=300).metrics["window_calls"] == 1
        assert len(before.result(timeout=300).loss_fn_outputs) == 2
        with pytest.raises(tinker.RequestFailedError, match="took the ranks down 2 times") as given_up:
            poison.result(timeout=300)
        assert given_up.value.category == "server"
        assert len(behind.result(timeout=300).loss_fn_outputs) == 2
        with pytest.raises(tinker.RequestFailedError, match="lost forward_backward seq_id 2"):
            step.result(timeout=300)
        # Whoever knows of the failure may go on, in an empty window.
        for client in (undisturbed, hit):
            client.forward_backward(batch(3, 5), "cross_entropy")
            assert client.optim_step(ADAM).result(timeout=300).metrics["window_calls"] == 1
        assert torch.equal(gradient(at, hit, 0), gradient(at, undisturbed, 0))
        assert metric(at, "tinkerbus_recoveries_total") == 3
        assert metric(at, "tinkerbus_replay_mismatches_total") == 0
    finally:
        poisoned.file.unlink()
    # A rank that dies for another reason later does not wake it up again.
    os.kill(rank(at), signal.SIGKILL)
    hit.forward_backward(batch(2, 6), "cross_entropy")
    assert hit.optim_step(ADAM).result(timeout=300).metrics["step"] == 2


def test_a_stopped_rank_costs_time_and_nothing_else(poisoned: Poisoned) -> None:
    at = poisoned.at
    undisturbed, client = sdk.training_client(at.service), sdk.training_client(at.service)
    for each in (undisturbed, client):
        each.forward_backward(batch(2, 1), "cross_entropy").result(timeout=sdk.WAIT_S)
    undisturbed.forward_backward(batch(3, 2), "cross_entropy")
    undisturbed.optim_step(ADAM).result(timeout=sdk.WAIT_S)
    os.kill(rank(at), signal.SIGSTOP)
    client.forward_backward(batch(3, 2), "cross_entropy")
    assert client.optim_step(ADAM).result(timeout=120).metrics["window_calls"] == 2
    assert torch.equal(gradient(at, client, 0), gradient(at, undisturbed, 0))


def dispatcher(at: Served) -> int:
    (found,) = [p.pid for p in at.service.tree() if "DispatcherPart" in " ".join(p.cmdline())]
    return found


async def test_a_stopped_dispatcher_that_lost_its_lease_wakes_up_and_touches_nothing(
    poisoned: Poisoned,
) -> None:
    at = poisoned.at
    undisturbed, client = [await asyncio.to_thread(sdk.training_client, at.service) for _ in range(2)]
    for each in (undisturbed, client):
        each.forward_backward(batch(2, 1), "cross_entropy").result(timeout=sdk.WAIT_S)
    undisturbed.forward_backward(batch(3, 2), "cross_entropy")
    undisturbed.optim_step(ADAM).result(timeout=sdk.WAIT_S)
    mismatches = metric(at, "tinkerbus_replay_mismatches_total")

    stopped = dispatcher(at)
    os.kill(stopped, signal.SIGSTOP)
    try:
        # Another dispatcher takes over, as it may once the lease has run out; this one only holds it.
        taken = await asyncio.wait_for(take_over(at), 60)
        client.forward_backward(batch(3, 2), "cross_entropy")
        step = client.optim_step(ADAM)
        await asyncio.sleep(1)
    finally:
        os.kill(stopped, signal.SIGCONT)
    # The woken one may not even answer what has come meanwhile; its successor does, with an epoch of its own.
    assert (await asyncio.to_thread(step.result, timeout=200)).metrics["window_calls"] == 2
    assert dispatcher(at) != stopped
    assert (await row_of_lease(at)).epoch == taken.epoch + 1
    assert torch.equal(gradient(at, client, 0), gradient(at, undisturbed, 0))
    assert metric(at, "tinkerbus_replay_mismatches_total") == mismatches


@contextlib.asynccontextmanager
async def leases_of(at: Served) -> AsyncIterator[Table[LeaseRow]]:
    credentials = Credentials(SERVER_USER, (at.service.data / "nats" / "server.password").read_text().strip())
    async with await connect(at.service.nats, credentials, name="test") as bus:
        yield await lease.open_leases(bus)


async def take_over(at: Served) -> LeaseRow:
    async with leases_of(at) as leases:
        held = await Lease.acquire(leases, "main", "another", 5.0)
        found = await leases.get("main")
    assert found is not None
    assert found[0].epoch == held.epoch
    return found[0]


async def row_of_lease(at: Served) -> LeaseRow:
    async with leases_of(at) as leases:
        found = await leases.get("main")
    assert found is not None
    return found[0]
