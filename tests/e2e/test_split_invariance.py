"""Through the SDK and through NATS: a window's gradient does not depend on how its datums came in."""

from __future__ import annotations

import asyncio
import secrets

import pytest
import torch
from tinker import types

from bus import client as bus_client
from bus.events import LoraConfig
from bus.subjects import escape
from tests.e2e.conftest import Served
from tests.support import dumps, sdk
from tests.support.requests import datums

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LENGTHS = (7, 3, 11, 2, 5, 16, 9, 4)
SPLITS = {"1x8": (8,), "2x4": (4, 4), "8x1": (1,) * 8, "8+zero": (8, 1)}
LEARNING_RATE = 1e-3


def _batches(sizes: tuple[int, ...]) -> list[list[tuple[torch.Tensor, dict[str, torch.Tensor]]]]:
    """The eight datums in calls of these sizes; what goes beyond them is a datum of zero weights."""
    everything = [
        *zip(*datums(LENGTHS, seed=5), strict=True),
        *zip(*datums((6,), seed=9, weight=0.0), strict=True),
    ]
    out, start = [], 0
    for size in sizes:
        out.append([(tokens, inputs.tensors) for tokens, inputs in everything[start : start + size]])
        start += size
    return out


def _warm() -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """A first window: B is 0 in it, and with it A's gradient."""
    return [(tokens, inputs.tensors) for tokens, inputs in zip(*datums((9, 9), seed=2), strict=True)]


def _gradients(served: Served, model_id: str) -> list[torch.Tensor]:
    ranks = len(list((served.dumps / escape(model_id) / "000001").iterdir()))
    return [dumps.vector(dumps.of_rank(served.dumps, model_id, 1, rank)["gradient"]) for rank in range(ranks)]


def through_sdk(served: Served) -> dict[str, list[torch.Tensor]]:
    found = {}
    adam = types.AdamParams(learning_rate=LEARNING_RATE)
    for name, sizes in SPLITS.items():
        client = sdk.training_client(served.service)
        pending = [client.forward_backward([sdk.sdk_datum(*d) for d in _warm()], "cross_entropy")]
        pending.append(client.optim_step(adam))
        for batch in _batches(sizes):
            pending.append(client.forward_backward([sdk.sdk_datum(*d) for d in batch], "cross_entropy"))
        step = client.optim_step(adam)
        for future in pending:
            future.result(timeout=sdk.WAIT_S)
        assert step.result(timeout=sdk.WAIT_S).metrics["finalizations"] == 1
        found[name] = _gradients(served, sdk.model_id(client))
    return found


async def through_nats(served: Served) -> dict[str, list[torch.Tensor]]:
    found = {}
    service = served.service
    async with await bus_client.connect(
        service.nats, tenant="default", password=service.nats_password
    ) as client:
        for name, sizes in SPLITS.items():
            model_id = f"{name}-{secrets.token_hex(4)}"
            lora = LoraConfig(rank=8, seed=3)
            model = await client.create_model(model_id, base_model="tiny", lora=lora)
            pending = [
                await model.forward_backward([sdk.bus_datum(*d) for d in _warm()], loss="cross_entropy")
            ]
            await model.optim_step(learning_rate=LEARNING_RATE)
            for batch in _batches(sizes):
                pending.append(
                    await model.forward_backward([sdk.bus_datum(*d) for d in batch], loss="cross_entropy")
                )
            step = await model.optim_step(learning_rate=LEARNING_RATE)
            for call in pending:
                await call
            assert (await step).metrics["finalizations"] == 1
            found[name] = _gradients(served, model_id)
    return found


@pytest.mark.parametrize("fixture", ["one_rank", "two_ranks"])
async def test_one_datum_microbatches_give_the_same_bits(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    served: Served = request.getfixturevalue(fixture)
    by_sdk = await asyncio.to_thread(through_sdk, served)
    first = by_sdk["1x8"][0]
    assert first.norm() > 1
    for way, found in {"sdk": by_sdk, "nats": await through_nats(served)}.items():
        for split, ranks in found.items():
            for rank, gradient in enumerate(ranks):
                assert torch.equal(gradient, first), (way, split, rank)


async def test_microbatches_of_several_datums_agree_to_rounding(
    default_packing: Served, one_rank: Served
) -> None:
    exact = (await asyncio.to_thread(through_sdk, one_rank))["1x8"][0]
    for way, found in {
        "sdk": await asyncio.to_thread(through_sdk, default_packing),
        "nats": await through_nats(default_packing),
    }.items():
        for split, ranks in found.items():
            for rank, gradient in enumerate(ranks):
                assert dumps.relative_l2(gradient, exact) <= 2e-6, (way, split, rank)
