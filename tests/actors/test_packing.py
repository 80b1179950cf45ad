"""The packing plan: every datum once, within its budgets, in a stated order, from lengths and configuration alone."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.packing import PackingConfig, pack, plan, share
from loss_hub import DatumInputs, check

lengths_of_a_request = st.lists(st.integers(1, 200), min_size=1, max_size=40)
configs = st.builds(
    PackingConfig,
    max_tokens_per_microbatch=st.integers(1, 600),
    max_datums_per_microbatch=st.integers(0, 6),
)
any_plan = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3).map(tuple), max_size=20)


@given(lengths=lengths_of_a_request, config=configs)
def test_every_datum_stands_in_exactly_one_microbatch(lengths: list[int], config: PackingConfig) -> None:
    planned = plan(lengths, config)
    assert sorted(i for microbatch in planned for i in microbatch) == list(range(len(lengths)))


@given(lengths=lengths_of_a_request, config=configs)
def test_padded_tokens_and_datums_stay_within_their_budgets(
    lengths: list[int], config: PackingConfig
) -> None:
    for microbatch in plan(lengths, config):
        if config.max_datums_per_microbatch:
            assert len(microbatch) <= config.max_datums_per_microbatch
        padded = len(microbatch) * max(lengths[i] for i in microbatch)
        assert padded <= config.max_tokens_per_microbatch or len(microbatch) == 1


@given(lengths=lengths_of_a_request, config=configs)
def test_microbatches_follow_their_first_datum_and_datums_the_request(
    lengths: list[int], config: PackingConfig
) -> None:
    planned = plan(lengths, config)
    firsts = [microbatch[0] for microbatch in planned]
    assert firsts == sorted(firsts)
    assert all(list(microbatch) == sorted(microbatch) for microbatch in planned)


@given(lengths=lengths_of_a_request, config=configs)
def test_lengths_of_a_microbatch_are_neighbours_among_all_lengths(
    lengths: list[int], config: PackingConfig
) -> None:
    """No datum elsewhere is strictly between the shortest and the longest: that keeps the padding small."""
    planned = plan(lengths, config)
    for microbatch in planned:
        own = [lengths[i] for i in microbatch]
        for other in planned:
            if other is not microbatch:
                assert not any(min(own) < lengths[i] < max(own) for i in other)


@given(lengths=lengths_of_a_request, tokens=st.integers(1, 600))
def test_one_datum_microbatches_stand_in_the_requests_order(lengths: list[int], tokens: int) -> None:
    planned = plan(lengths, PackingConfig(tokens, max_datums_per_microbatch=1))
    assert planned == tuple((i,) for i in range(len(lengths)))


@given(lengths=lengths_of_a_request, config=configs)
def test_the_plan_is_the_same_every_time(lengths: list[int], config: PackingConfig) -> None:
    assert plan(lengths, config) == plan(tuple(lengths), PackingConfig(*_fields(config)))


def _fields(config: PackingConfig) -> tuple[int, int]:
    return config.max_tokens_per_microbatch, config.max_datums_per_microbatch


def test_a_worked_example() -> None:
    config = PackingConfig(max_tokens_per_microbatch=22, max_datums_per_microbatch=3)
    # By length: 11 (2), 7 (0), 5 (4), 3 (1), 2 (3). 11 and 7 pad to 22; 5, 3 and 2 are three.
    assert plan([7, 3, 11, 2, 5], config) == ((0, 2), (1, 3, 4))


@given(microbatches=any_plan, first=st.integers(0, 50), dp=st.integers(1, 9))
def test_ranks_share_all_microbatches_once_and_evenly(
    microbatches: list[tuple[int, ...]], first: int, dp: int
) -> None:
    shares = [share(microbatches, first, rank, dp) for rank in range(dp)]
    assert sorted(k for part in shares for k in part) == list(range(len(microbatches)))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(part == sorted(part) for part in shares)


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6), dp=st.integers(1, 5))
def test_a_microbatch_of_the_window_goes_to_the_same_rank_however_calls_split_it(
    sizes: list[int], dp: int
) -> None:
    for rank in range(dp):
        whole = share([(0,)] * sum(sizes), 0, rank, dp)
        by_call, first = [], 0
        for size in sizes:
            by_call += [first + k for k in share([(0,)] * size, first, rank, dp)]
            first += size
        assert by_call == whole


def test_a_packed_request_holds_every_datum_one_after_the_other() -> None:
    tokens = [torch.tensor([1, 2]), torch.tensor([3])]
    inputs = [
        DatumInputs(2, {"target_tokens": torch.tensor([[2, 3], [4, 5]])}),
        DatumInputs(1, {"target_tokens": torch.tensor([6]), "weights": torch.tensor([0.5])}),
    ]
    request = pack(tokens, check("cross_entropy", {}, inputs), PackingConfig(), forward_only=True)
    assert request.lengths == (2, 1)
    assert request.ks == (2, None)
    assert request.num_tokens == 3
    assert request.forward_only
    np.testing.assert_array_equal(request.tokens, [1, 2, 3])
    np.testing.assert_array_equal(request.inputs["target_tokens"], [2, 3, 4, 5, 6])
    np.testing.assert_array_equal(request.inputs["weights"], np.float32([1, 1, 1, 1, 0.5]))
