"""What a layout refuses, in one sentence that names the setting, before anything is started."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from actors.layout import Layout, LayoutError
from actors.models import tiny
from actors.models.spec import ModelSpec, MoeSpec

DENSE = tiny.spec()
"""4 layers, 4 heads, 2 groups."""
MOE = replace(DENSE, moe=MoeSpec(num_experts=4, ffn_hidden_size=64, top_k=2, normalized=True))


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"dp": 0}, "layout.dp is 0; it must be at least 1"),
        ({"pp": -1}, "layout.pp is -1; it must be at least 1"),
        ({"cp": 2}, "layout.cp is 2, but context parallelism needs Transformer Engine's attention"),
        ({"sequence_parallel": True}, "layout.sequence_parallel splits over .* but layout.tp is 1"),
        ({"virtual_pp": 2}, "layout.virtual_pp is 2, but chunks interleave over pipeline stages"),
        ({"dp": 2, "ep": 4}, r"layout.ep is 4; it must divide the tp · dp = 2 ranks"),
        ({"dp": 2, "tp": 3, "ep": 2}, r"layout.ep is 2; .* divide tp = 3 or be a multiple of it"),
    ],
)
def test_sizes_that_contradict_each_other(sizes: dict[str, Any], says: str) -> None:
    with pytest.raises(LayoutError, match=says) as caught:
        Layout(**sizes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "spec", "says"),
    [
        (Layout(tp=3), DENSE, "layout.tp is 3, which does not divide the model's 4 attention heads"),
        (Layout(tp=4), DENSE, "layout.tp is 4, which does not divide the model's 2 key/value heads"),
        (Layout(tp=2), replace(DENSE, ffn_hidden_size=7), "does not divide the model's 7 MLP columns"),
        (Layout(pp=3), DENSE, re.escape("layout.pp · layout.virtual_pp is 3 · 1 = 3, which does not divide")),
        (Layout(pp=2, virtual_pp=4), DENSE, re.escape("is 2 · 4 = 8, which does not divide")),
        (Layout(pp=8), DENSE, "does not divide the model's 4 layers"),
        (Layout(dp=2, ep=2), DENSE, "layout.ep is 2, but the model has no experts"),
        (Layout(dp=8, ep=8), MOE, "layout.ep is 8, which does not divide the model's 4 experts"),
        (Layout(tp=2), MOE, "layout.tp is 2 for a model with experts, which needs layout.sequence_parallel"),
    ],
)
def test_a_model_that_cannot_be_laid_out_like_this(layout: Layout, spec: ModelSpec, says: str) -> None:
    with pytest.raises(LayoutError, match=says) as caught:
        layout.check(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "spec", "ranks"),
    [
        (Layout(), DENSE, 1),
        (Layout(tp=2, dp=2), DENSE, 4),
        (Layout(tp=2, pp=2, sequence_parallel=True, distributed_optimizer=True), DENSE, 4),
        (Layout(dp=2, ep=2, pp=2), MOE, 4),
        (Layout(tp=2, dp=2, ep=4, sequence_parallel=True), MOE, 4),
    ],
)
def test_products_that_work(layout: Layout, spec: ModelSpec, ranks: int) -> None:
    layout.check(spec)
    assert layout.world_size == ranks


def test_a_vocabulary_is_padded_to_equal_shares() -> None:
    assert Layout(tp=2).padded_vocab(321) == 322
    assert Layout(tp=2).padded_vocab(320) == 320
    assert Layout().padded_vocab(321) == 321
