"""Several requests in one pass, and windows that data-parallel ranks cannot share evenly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.contract import EngineConfig
from actors.group import RequestOutput
from actors.layout import Layout
from actors.packing import PackedRequest, PackingConfig
from tests.support import dumps, layouts
from tests.support.layouts import LAYOUTS
from tests.support.requests import datums, packed
from tests.support.world import World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LOSSES: tuple[tuple[str, dict[str, float | str]], ...] = (
    ("cross_entropy", {}),
    ("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}),
    ("importance_sampling", {}),
)
LENGTHS = ((7, 3, 11), (5, 9), (2, 14, 6, 4), (8, 8, 3))
SMALL = PackingConfig(max_tokens_per_microbatch=16)
"""So that each request has several microbatches, of one datum or more."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(2) as world:
        yield world


def mixed(packing: PackingConfig, *, forward_only: bool) -> list[PackedRequest]:
    requests = []
    for number, ((loss, config), lengths) in enumerate(zip(LOSSES, LENGTHS, strict=True)):
        tokens, inputs = datums(lengths, loss=loss, seed=number)
        requests.append(
            packed(tokens, inputs, loss=loss, config=config, packing=packing, forward_only=forward_only)
        )
    return requests


def assert_same(found: RequestOutput, wanted: RequestOutput) -> None:
    assert found.metrics == wanted.metrics
    for ours, theirs in zip(found.logprobs, wanted.logprobs, strict=True):
        assert ours.shape == theirs.shape
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("packing", [SMALL, layouts.ONE_DATUM], ids=["packed", "one-datum"])
@pytest.mark.parametrize("name", ["DP1", "DP2", "TP2", "PP2", "PP2 interleaved", "EP2 MoE"])
def test_each_request_of_a_pass_has_the_answer_and_the_bits_it_has_alone(
    world: World, tmp_path: Path, name: str, packing: PackingConfig
) -> None:
    base, layout = LAYOUTS[name]
    config = EngineConfig(layouts.folder(tmp_path, base), layout, dump_gradients=tmp_path / "dumps")
    requests = mixed(packing, forward_only=False)
    assert all(len(request.microbatches) > 1 for request in requests)
    with world.opened(config) as ranks:
        together = layouts.Model(ranks, "LoRA", b_seed=1)
        alone = layouts.Model(ranks, "LoRA", b_seed=1)
        scores = mixed(packing, forward_only=True)
        for found, request in zip(together.together(scores), scores, strict=True):
            assert_same(found, alone.call(request))
        for found, request in zip(together.together(requests), requests, strict=True):
            assert_same(found, alone.call(request))
        gradients = [dumps.vector(model.step()["gradient"]) for model in (together, alone)]
    assert gradients[0].norm() > 0
    assert torch.equal(*gradients)


def window(world: World, config: EngineConfig, sizes: tuple[int, ...]) -> tuple[Tensor, list[np.ndarray]]:
    """The gradient of calls of so many one-datum microbatches, and the logprobs of forwards between them."""
    tokens, inputs = datums([3 + 2 * i for i in range(sum(sizes))], seed=1)
    scored: list[np.ndarray] = []
    with world.opened(config) as ranks:
        model = layouts.Model(ranks, "LoRA", b_seed=1)
        start = 0
        for size in sizes:
            here = slice(start, start + size)
            start += size
            for forward_only in (True, False):
                request = packed(
                    tokens[here], inputs[here], packing=layouts.ONE_DATUM, forward_only=forward_only
                )
                scored += model.call(request).logprobs
        return dumps.vector(model.step()["gradient"]), scored


@pytest.mark.parametrize("sizes", [(2, 1, 3), (1,), (2,), (3,), (5,), (1, 2, 3, 5)], ids=str)
def test_windows_that_two_ranks_cannot_share_evenly(
    world: World, tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    folder = layouts.folder(tmp_path, "dense")
    results = [
        window(world, EngineConfig(folder, Layout(dp=dp), dump_gradients=tmp_path / f"dp{dp}"), sizes)
        for dp in (1, 2)
    ]
    (one, scored_by_one), (two, scored_by_two) = results
    assert dumps.relative_l2(two, one) <= 2e-6
    for ours, theirs in zip(scored_by_two, scored_by_one, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)
