"""A window's gradient does not depend on how its datums were split over calls, nor on the number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import pytest_asyncio
import torch

from actors.contract import AdapterConfig, EngineConfig
from actors.group import GroupConfig, MegatronGroup
from actors.layout import Layout
from actors.packing import PackingConfig
from bus.events import AdamParams
from tests.support import dumps
from tests.support.ranks import GroupThatFinalizesEveryCall
from tests.support.requests import datums, packed

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

LENGTHS = (7, 3, 11, 2, 5, 16, 9, 4)
SPLITS = {"1x8": (8,), "2x4": (4, 4), "8x1": (1,) * 8, "5+3": (5, 3), "8+zero": (8, -1)}
"""Datums of each call; −1 stands for a call of one datum whose weights are all 0."""
LAYOUTS = {
    "dp1": Layout(),
    "dp2": Layout(dp=2),
    "dp2-distributed": Layout(dp=2, distributed_optimizer=True),
}
ONE_BY_ONE, TOGETHER = PackingConfig(max_datums_per_microbatch=1), PackingConfig()

Gradients = dict[str, list[torch.Tensor]]
"""By split, then rank."""


async def window_gradients(group: MegatronGroup, dump: Path, packing: PackingConfig, ranks: int) -> Gradients:
    """The second window's gradient: B is 0 in the first one, and A's gradient with it."""
    tokens, inputs = datums(LENGTHS, seed=5)
    zero_tokens, zero_inputs = datums((6,), seed=9, weight=0.0)
    found: Gradients = {}
    for split, sizes in SPLITS.items():
        name = f"{split} in microbatches of {packing.max_datums_per_microbatch or 'many'}"
        await group.create(name, AdapterConfig(rank=8, alpha=32, seed=3))
        await group.forward_backward(name, packed(*datums((9, 9), seed=2), packing=packing))
        await group.optim_step(name, AdamParams(learning_rate=1e-3))
        start, pending = 0, []
        for size in sizes:
            if size < 0:
                request = packed(zero_tokens, zero_inputs, packing=packing)
            else:
                part = slice(start, start + size)
                request = packed(tokens[part], inputs[part], packing=packing)
                start += size
            pending.append(group.forward_backward(name, request))
        step = group.optim_step(name, AdamParams(learning_rate=1e-3))
        for future in pending:
            await future
        report = await step
        assert report.finalizations == 1
        assert report.window_calls == len(sizes)
        found[split] = [dumps.vector(dumps.of_rank(dump, name, 1, rank)["gradient"]) for rank in range(ranks)]
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def found(
    ray_cluster: None, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, PackingConfig], Gradients]:
    """By layout and packing. One group a layout: most of the time goes into starting them."""
    out = {}
    for name, layout in LAYOUTS.items():
        dump = tmp_path_factory.mktemp(name)
        group = await MegatronGroup.start(GroupConfig(EngineConfig(tiny_folder, layout, dump_gradients=dump)))
        try:
            for packing in (ONE_BY_ONE, TOGETHER):
                out[name, packing] = await window_gradients(group, dump, packing, layout.world_size)
        finally:
            group.close()
    return out


def assert_every_split_has_the_same_bits(gradients: Gradients) -> None:
    """On every rank; split and rank of one that differs are in the message."""
    first = gradients["1x8"][0]
    assert first.norm() > 1
    for split, ranks in gradients.items():
        for rank, gradient in enumerate(ranks):
            assert torch.equal(gradient, first), (split, rank)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_splits_give_the_same_bits_where_microbatches_hold_one_datum(
    found: dict[tuple[str, PackingConfig], Gradients], layout: str
) -> None:
    assert_every_split_has_the_same_bits(found[layout, ONE_BY_ONE])


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_splits_agree_to_rounding_where_microbatches_hold_several(
    found: dict[tuple[str, PackingConfig], Gradients], layout: str
) -> None:
    first = found[layout, TOGETHER]["1x8"][0]
    for split, ranks in found[layout, TOGETHER].items():
        for rank, gradient in enumerate(ranks):
            assert dumps.relative_l2(gradient, first) <= 2e-6, (split, rank)


async def test_layouts_and_packings_agree_to_rounding(
    found: dict[tuple[str, PackingConfig], Gradients],
) -> None:
    reference = found["dp1", ONE_BY_ONE]["1x8"][0]
    for key, gradients in found.items():
        assert dumps.relative_l2(gradients["1x8"][0], reference) <= 2e-6, key


async def test_finalizing_every_call_would_fail_the_check(
    found: dict[tuple[str, PackingConfig], Gradients], tiny_folder: Path, tmp_path: Path
) -> None:
    """The reduce-scatter leaves a rank its shard of the sum and local values elsewhere: a mix, once added to."""
    config = GroupConfig(EngineConfig(tiny_folder, LAYOUTS["dp2-distributed"], dump_gradients=tmp_path))
    group = await GroupThatFinalizesEveryCall.start(config)
    try:
        gradients = await window_gradients(group, tmp_path, ONE_BY_ONE, ranks=2)
    finally:
        group.close()
    with pytest.raises(AssertionError, match="2x4"):
        assert_every_split_has_the_same_bits(gradients)
    first = gradients["1x8"][0]  # one call a window: finalized once, as it should be
    assert torch.equal(first, found["dp2-distributed", ONE_BY_ONE]["1x8"][0])
    for split in ("2x4", "8x1", "5+3"):
        assert dumps.relative_l2(gradients[split][0], first) > 0.1, split
