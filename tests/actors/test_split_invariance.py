"""A window's gradient does not depend on how its datums were split over calls, nor on the number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.engine import EngineConfig
from actors.group import GroupConfig, MegatronGroup
from actors.layout import Layout
from actors.lora import AdapterConfig
from actors.packing import PackingConfig
from bus.events import AdamParams
from tests.support import dumps
from tests.support.requests import datums, packed

LENGTHS = (7, 3, 11, 2, 5, 16, 9, 4)
SPLITS = {"1x8": (8,), "2x4": (4, 4), "8x1": (1,) * 8, "5+3": (5, 3)}


async def window_gradients(
    folder: Path, dump: Path, layout: Layout, packing: PackingConfig
) -> dict[str, list[torch.Tensor]]:
    """The second window's gradient of every rank, per split, and with an all-zero-weight datum behind it."""
    config = GroupConfig(EngineConfig(folder, layout, dump_gradients=dump))
    group = await MegatronGroup.start(config)
    tokens, inputs = datums(LENGTHS, seed=5)
    zero_tokens, zero_inputs = datums((6,), seed=9, weight=0.0)
    try:
        for name, sizes in {**SPLITS, "8+zero": (8, -1)}.items():
            await group.create(name, AdapterConfig(rank=8, alpha=32, seed=3))
            # B is 0 in the first window, and A's gradient with it: look at the second one.
            warm = packed(*datums((9, 9), seed=2), packing=packing)
            await group.forward_backward(name, warm)
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
    finally:
        group.close()
    return {
        name: [dumps.vector(dumps.read(dump, name, 1, rank)["gradient"]) for rank in range(layout.world_size)]
        for name in (*SPLITS, "8+zero")
    }


LAYOUTS = {
    "dp1": Layout(),
    "dp2": Layout(dp=2),
    "dp2-distributed": Layout(dp=2, distributed_optimizer=True),
}


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
async def test_splits_give_the_same_bits_and_layouts_the_same_gradient(
    tiny_folder: Path, tmp_path: Path
) -> None:
    reference: torch.Tensor | None = None
    for name, layout in LAYOUTS.items():
        found = await window_gradients(
            tiny_folder, tmp_path / name, layout, PackingConfig(max_datums_per_microbatch=1)
        )
        first = found["1x8"][0]
        assert first.norm() > 1
        for split, ranks in found.items():
            for rank, gradient in enumerate(ranks):
                assert torch.equal(gradient, first), (name, split, rank)
        reference = first if reference is None else reference
        assert dumps.relative_l2(first, reference) <= 2e-6, name


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
async def test_splits_agree_to_rounding_when_microbatches_hold_several_datums(
    tiny_folder: Path, tmp_path: Path
) -> None:
    found = await window_gradients(tiny_folder, tmp_path, Layout(dp=2), PackingConfig())
    first = found["1x8"][0]
    for split, ranks in found.items():
        for rank, gradient in enumerate(ranks):
            assert dumps.relative_l2(gradient, first) <= 2e-6, (split, rank)
