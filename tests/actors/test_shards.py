"""Parts of a tensor make the whole again, whatever the number of ranks."""

from __future__ import annotations

import pytest
import torch

from actors.shards import Shard, part, whole


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("split", [0, 1, None])
def test_the_parts_of_a_tensor_make_the_whole(ranks: int, split: int | None) -> None:
    full = torch.randn(7, 6)
    parts = {
        rank: Shard("x", part(full, split, rank, ranks), split, None if split is None else full.shape[split])
        for rank in range(ranks)
    }
    assert torch.equal(whole(parts), full)
    assert len({shard.tensor.shape for shard in parts.values()}) == 1


def test_rows_that_the_ranks_do_not_divide_are_filled_with_zeros() -> None:
    last = part(torch.ones(5, 2), 0, 1, 2)
    assert last.tolist() == [[1, 1], [1, 1], [0, 0]]
