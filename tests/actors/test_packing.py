"""The packing plan: every datum once, within its budgets, in a stated order, from lengths and configuration alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.packing import PackedRequest, PackingConfig, Schedule, Slot, pack, plan, slots
from loss_hub import DatumInputs, check

lengths_of_a_request = st.lists(st.integers(1, 200), min_size=1, max_size=40)
configs = st.builds(
    PackingConfig,
    max_tokens_per_microbatch=st.integers(1, 600),
    max_datums_per_microbatch=st.integers(0, 6),
)


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


def request_of(*microbatches: int, request_lengths: tuple[int, ...] = (), **fields: Any) -> PackedRequest:
    """A request whose microbatches hold that many datums, of lengths 1, 2, 3 … unless given."""
    total = sum(microbatches)
    lengths = request_lengths or tuple(range(1, total + 1))
    starts = list(accumulate(microbatches, initial=0))
    plan_ = tuple(tuple(range(a, b)) for a, b in pairwise(starts))
    checked: Any = {"loss": None, "config": None, "ks": (None,) * total, "inputs": {}, "forward_only": False}
    return PackedRequest(
        lengths=lengths, tokens=np.zeros(sum(lengths), np.int64), microbatches=plan_, **{**checked, **fields}
    )


def ran(slots_: Sequence[Slot]) -> list[tuple[int, int]]:
    return [(slot.request, slot.index) for slot in slots_ if slot.index is not None]


any_requests = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6), min_size=1, max_size=4)


@given(sizes=any_requests, first=st.integers(0, 50), dp=st.integers(1, 9))
def test_ranks_share_all_microbatches_once_and_evenly(sizes: list[list[int]], first: int, dp: int) -> None:
    requests = [request_of(*microbatches) for microbatches in sizes]
    firsts = [first + sum(map(len, sizes[:number])) for number in range(len(sizes))]
    shares = [slots(requests, firsts, rank, Schedule(dp)) for rank in range(dp)]
    wanted = [(number, index) for number, request in enumerate(sizes) for index in range(len(request))]
    assert sorted(chosen for part in shares for chosen in ran(part)) == wanted
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(ran(part) == sorted(ran(part)) for part in shares)
    assert all(len(ran(part)) == len(part) for part in shares), "padding where nothing asks for it"


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6), dp=st.integers(1, 5))
def test_a_microbatch_of_the_window_goes_to_the_same_rank_however_calls_split_it(
    sizes: list[int], dp: int
) -> None:
    for rank in range(dp):
        whole = [i for _, i in ran(slots([request_of(*[1] * sum(sizes))], [0], rank, Schedule(dp)))]
        by_call, first = [], 0
        for size in sizes:
            by_call += [
                first + i for _, i in ran(slots([request_of(*[1] * size)], [first], rank, Schedule(dp)))
            ]
            first += size
        assert by_call == whole


@given(
    sizes=any_requests,
    first=st.integers(0, 9),
    groups=st.integers(1, 3),
    lockstep=st.integers(1, 3),
    multiple=st.integers(1, 3),
    columns=st.integers(1, 4),
    one=st.booleans(),
)
def test_ranks_in_lockstep_run_as_many_slots_of_the_same_shapes(
    sizes: list[list[int]], first: int, groups: int, lockstep: int, multiple: int, columns: int, one: bool
) -> None:
    requests = [request_of(*microbatches) for microbatches in sizes]
    firsts = [first + sum(map(len, sizes[:number])) for number in range(len(sizes))]
    schedule = Schedule(groups * lockstep, lockstep, multiple, columns, one)
    plans = [slots(requests, firsts, rank, schedule) for rank in range(groups * lockstep)]
    everything = [chosen for plan_ in plans for chosen in ran(plan_)]
    assert sorted(everything) == [(n, i) for n, request in enumerate(sizes) for i in range(len(request))]
    for start in range(0, len(plans), lockstep):
        together = plans[start : start + lockstep]
        shapes = {tuple((slot.rows, slot.columns) for slot in plan_) for plan_ in together}
        assert len(shapes) == 1
        assert len(together[0]) % multiple == 0
        for moment in zip(*together, strict=True):
            real = [slot for slot in moment if slot.index is not None]
            assert len({slot.request for slot in real}) <= 1
            assert not one or len(real) <= 1
            for slot in real:
                datums = requests[slot.request].microbatches[slot.index or 0]
                longest = max(requests[slot.request].lengths[i] for i in datums)
                assert slot.rows >= len(datums)
                assert slot.columns >= longest
                assert slot.columns % columns == 0


@given(sizes=any_requests, first=st.integers(0, 9), dp=st.integers(1, 4), lockstep=st.sampled_from([1, 2]))
def test_requests_in_one_pass_run_in_the_slots_they_have_alone(
    sizes: list[list[int]], first: int, dp: int, lockstep: int
) -> None:
    schedule = Schedule(dp * lockstep, lockstep)
    requests = [request_of(*microbatches) for microbatches in sizes]
    firsts = [first + sum(map(len, sizes[:number])) for number in range(len(sizes))]
    for rank in range(dp * lockstep):
        together = [(s.rows, s.columns, s.index) for s in slots(requests, firsts, rank, schedule)]
        alone = [
            (s.rows, s.columns, s.index)
            for request, before in zip(requests, firsts, strict=True)
            for s in slots([request], [before], rank, schedule)
        ]
        assert together == alone


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
