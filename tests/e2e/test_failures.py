"""Ranks that stop or die, again and again: every request has its answer, and what was not at fault is not touched."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import tinker
import torch
from tinker import types

from tests.e2e.conftest import Served, served
from tests.support import dumps, mutants, sdk
from tests.support.requests import datums
from tests.support.service import left_over

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
        recovery={"heartbeat_timeout_s": 4, "lease_s": 3},
    ):
        yield Poisoned(at, file)


def batch(size: int, seed: int) -> list[types.Datum]:
    tokens, inputs = datums((5,) * size, seed=seed)
    return [sdk.sdk_datum(t, i.tensors) for t, i in zip(tokens, inputs, strict=True)]


def rank(at: Served) -> int:
    """The process of the one rank."""
    (found,) = [p.pid for p in at.service.tree() if "ray::Rank" in " ".join(p.cmdline())]
    return found


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
        assert at.service.metric("tinkerbus_recoveries_total") == 3
        assert at.service.metric("tinkerbus_replay_mismatches_total") == 0
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


@dataclass(frozen=True)
class Halted:
    """A model of which a call is in the window, and what stopped before the rest was sent."""

    undisturbed: tinker.TrainingClient
    client: tinker.TrainingClient
    dispatcher: psutil.Process
    epoch: int


def halted(at: Served) -> Halted:
    """The dispatcher that acts is stopped inside a window."""
    undisturbed, client = sdk.training_client(at.service), sdk.training_client(at.service)
    for each in (undisturbed, client):
        each.forward_backward(batch(2, 1), "cross_entropy").result(timeout=sdk.WAIT_S)
    undisturbed.forward_backward(batch(3, 2), "cross_entropy")
    undisturbed.optim_step(ADAM).result(timeout=sdk.WAIT_S)
    acting, epoch = at.service.acting_dispatcher(), at.service.leaseholder().epoch
    acting.suspend()
    return Halted(undisturbed, client, acting, epoch)


def goes_on(at: Served, model: Halted) -> None:
    """The one that stood by takes over, and the model's step is that of the one that nothing happened to."""
    model.client.forward_backward(batch(3, 2), "cross_entropy")
    step = model.client.optim_step(ADAM).result(timeout=120)
    assert step.metrics["window_calls"] == 2
    assert at.service.leaseholder().epoch == model.epoch + 1
    assert at.service.acting_dispatcher().pid != model.dispatcher.pid
    assert torch.equal(gradient(at, model.client, 0), gradient(at, model.undisturbed, 0))


def test_a_stopped_dispatcher_is_replaced_by_the_one_that_stands_by_and_killed(poisoned: Poisoned) -> None:
    at = poisoned.at
    model = halted(at)
    goes_on(at, model)
    assert left_over([model.dispatcher]) == []
    # There is one that stands by again.
    assert len(dispatchers(at, 2)) == 2


def test_a_stopped_dispatcher_that_wakes_up_beside_its_successor_touches_nothing(poisoned: Poisoned) -> None:
    at = poisoned.at
    mismatches = at.service.metric("tinkerbus_replay_mismatches_total")
    poisoned.file.write_text("predecessors are spared")
    try:
        model = halted(at)
        goes_on(at, model)
        # In the middle of the next window it wakes up, with operations and ranks of its own.
        model.client.forward_backward(batch(2, 3), "cross_entropy").result(timeout=sdk.WAIT_S)
        model.dispatcher.resume()
        model.client.forward_backward(batch(3, 4), "cross_entropy")
        assert model.client.optim_step(ADAM).result(timeout=120).metrics["window_calls"] == 2
        assert left_over([model.dispatcher], within_s=60) == []
    finally:
        poisoned.file.unlink()
    model.undisturbed.forward_backward(batch(2, 3), "cross_entropy")
    model.undisturbed.forward_backward(batch(3, 4), "cross_entropy")
    model.undisturbed.optim_step(ADAM).result(timeout=sdk.WAIT_S)
    assert torch.equal(gradient(at, model.client, 1), gradient(at, model.undisturbed, 1))
    assert at.service.leaseholder().epoch == model.epoch + 1
    assert at.service.metric("tinkerbus_replay_mismatches_total") == mismatches


def dispatchers(at: Served, count: int, within_s: float = 60.0) -> list[psutil.Process]:
    """The replicas, once there are so many."""
    deadline = time.monotonic() + within_s
    while True:
        found = [p for p in at.service.tree() if "DispatcherPart" in " ".join(p.cmdline())]
        if len(found) == count or time.monotonic() > deadline:
            return found
        time.sleep(0.2)
