"""Tenants of different ranks at one server, all or two of three in memory: each ends as if it had it to itself."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from tinker import types

from tests.e2e.conftest import Served, served
from tests.support import dumps, sdk
from tests.support.models import assert_same_bits
from tests.support.requests import datums

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RANKS = (4, 8, 16)
STEPS = 10
"""Of each of them: 30 in all."""
Operation = tuple[str, int]
"""(verb, number of the request)"""


def operations(rank: int) -> list[Operation]:
    """One tenant's: windows of one to three calls and a step, now and then a forward, once an empty step."""
    chance = random.Random(rank)
    mine: list[Operation] = []
    for step in range(STEPS):
        calls = 0 if step == 4 else chance.randint(1, 3)
        mine += [("forward_backward", 100 * step + call) for call in range(calls)]
        if chance.random() < 0.3:
            mine.insert(-1, ("forward", 100 * step))
        mine.append(("optim_step", step))
    return mine


def send(client: tinker.TrainingClient, operation: Operation) -> tinker.APIFuture:
    verb, number = operation
    if verb == "optim_step":
        clip = 1.0 if number % 2 else 0.0
        return client.optim_step(types.AdamParams(learning_rate=1e-3, grad_clip_norm=clip))
    tokens, inputs = datums((3 + number % 5, 7), seed=number)
    batch = [sdk.sdk_datum(t, i.tensors) for t, i in zip(tokens, inputs, strict=True)]
    call = client.forward if verb == "forward" else client.forward_backward
    return call(batch, "cross_entropy")


def train(at: Served, ranks: tuple[int, ...]) -> dict[int, str]:
    """Each tenant's operations in their order, tenants at random; the model ids."""
    clients = {rank: sdk.training_client(at.service, rank=rank, seed=rank) for rank in ranks}
    left = {rank: operations(rank) for rank in ranks}
    chance = random.Random(5)
    pending = []
    while left:
        rank = chance.choice(sorted(left))
        pending.append(send(clients[rank], left[rank].pop(0)))
        # Waiting now and then lets a tenant be idle, so that it is the one to go.
        if chance.random() < 0.3:
            pending[-1].result(timeout=sdk.WAIT_S)
        if not left[rank]:
            del left[rank]
    for future in pending:
        future.result(timeout=sdk.WAIT_S)
    return {rank: sdk.model_id(client) for rank, client in clients.items()}


@pytest.mark.timeout(600)
def test_three_tenants_with_all_or_two_in_memory_end_with_the_bits_of_servers_of_their_own(
    tmp_path: Path,
) -> None:
    alone = {}
    for rank in RANKS:
        for at in _fresh(tmp_path / f"alone-{rank}", 0):
            (model_id,) = train(at, (rank,)).values()
            alone[rank] = dumps.read(at.dumps, model_id, STEPS - 1)
    for most in (0, 2):
        for at in _fresh(tmp_path / f"together-{most}", most):
            models = train(at, RANKS)
            away = list((at.service.data / "away").glob("rank0/*"))
            assert len(away) == (len(RANKS) - most if most else 0)
            for rank, model_id in models.items():
                together = dumps.read(at.dumps, model_id, STEPS - 1)
                for kind in dumps.KINDS:
                    assert_same_bits(together[kind], alone[rank][kind])


def _fresh(folder: Path, most: int) -> Iterator[Served]:
    folder.mkdir()
    return served(folder, limits={"max_resident_models": most})
