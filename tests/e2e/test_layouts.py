"""Full-parameter training and tensor parallelism through the whole service."""

from __future__ import annotations

import secrets

import pytest
import tinker
import torch
from tinker import types

from bus import client as bus_client
from tests.e2e.conftest import Served
from tests.support import dumps, sdk
from tests.support.models import assert_same_bits
from tests.support.reference import FullReference
from tests.support.requests import datums

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ADAM = types.AdamParams(learning_rate=1e-3)
FULL = {"tinkerbus.training": "full"}
LENGTHS = (9, 4, 12)


def batch() -> list[types.Datum]:
    tokens, inputs = datums(LENGTHS, seed=7)
    return [sdk.sdk_datum(t, i.tensors) for t, i in zip(tokens, inputs, strict=True)]


def trained(served: Served, client: tinker.TrainingClient) -> dict[str, dict[str, torch.Tensor]]:
    """What a step on the batch dumps, whole."""
    client.forward_backward(batch(), "cross_entropy").result(timeout=sdk.WAIT_S)
    client.optim_step(ADAM).result(timeout=sdk.WAIT_S)
    return dumps.read(served.dumps, sdk.model_id(client), 0)


async def test_every_parameter_trains_through_the_sdk_and_through_nats(one_rank: Served) -> None:
    service = one_rank.service
    adapter = sdk.training_client(service)
    before = sdk.logprobs(adapter.forward(batch(), "cross_entropy").result(timeout=sdk.WAIT_S))
    by_sdk = trained(one_rank, sdk.training_client(service, user_metadata=FULL))

    reference = FullReference(service.data / "models" / "tiny")
    tokens, inputs = datums(LENGTHS, seed=7)
    reference.accumulate("cross_entropy", tokens, inputs)
    theirs = reference.gradient()
    assert by_sdk["gradient"].keys() == theirs.keys()
    assert dumps.relative_l2(dumps.vector(by_sdk["gradient"]), dumps.vector(theirs)) <= 5e-6

    async with await bus_client.connect(
        service.nats, tenant="default", password=service.nats_password
    ) as client:
        name = f"full-{secrets.token_hex(4)}"
        model = await client.create_model(name, base_model="tiny")
        data = [sdk.bus_datum(t, i.tensors) for t, i in zip(tokens, inputs, strict=True)]
        await (await model.forward_backward(data, loss="cross_entropy"))
        await (await model.optim_step(learning_rate=1e-3))
    by_nats = dumps.read(one_rank.dumps, name, 0)
    for kind in ("gradient", "after"):
        assert_same_bits(by_nats[kind], by_sdk[kind])

    # The base that adapters stand on is as it was.
    after = sdk.logprobs(adapter.forward(batch(), "cross_entropy").result(timeout=sdk.WAIT_S))
    assert sdk.equal(after, before)


@pytest.mark.parametrize("metadata", [None, FULL], ids=["LoRA", "full"])
def test_two_shards_train_like_one_rank(
    two_shards: Served, one_rank: Served, metadata: dict[str, str] | None
) -> None:
    one, two = (
        trained(served, sdk.training_client(served.service, user_metadata=metadata))
        for served in (one_rank, two_shards)
    )
    assert one["gradient"].keys() == two["gradient"].keys()
    difference = dumps.relative_l2(dumps.vector(two["gradient"]), dumps.vector(one["gradient"]))
    assert 0 < difference <= 2e-6
