"""Evaluation and merging: same bits with and without gradients, exact over any grouping."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loss_hub import DatumInputs, check, evaluate, get, merge, names

LENGTHS = (3, 17, 5, 30)


def rollout_request(name: str, config: dict[str, float] | None = None):
    torch.manual_seed(0)
    data = [
        DatumInputs(n, {"target_tokens": torch.zeros(n, dtype=torch.int64)} | rollout_inputs(name, n))
        for n in LENGTHS
    ]
    return check(name, config or {}, data)


def rollout_inputs(name: str, n: int) -> dict[str, torch.Tensor]:
    if name == "cross_entropy":
        return {"weights": torch.randn(n)}
    inputs = {"logprobs": -torch.rand(n), "advantages": torch.randn(n)}
    return inputs | ({"sequence_ratio_mask": torch.ones(n)} if name == "gspo" else {})


@pytest.mark.parametrize("name", names())
def test_forward_and_forward_backward_give_the_same_bits(name) -> None:
    request = rollout_request(name)
    batch = request.batch(range(4))
    lp_N = -torch.rand(sum(LENGTHS))
    with torch.no_grad():
        forward = evaluate(request.loss, lp_N, batch, request.config)
    backward = evaluate(request.loss, lp_N.clone().requires_grad_(), batch, request.config)
    assert forward.metrics == backward.metrics
    assert torch.equal(forward.loss_sum, backward.loss_sum.detach())
    assert not forward.loss_sum.requires_grad


@pytest.mark.parametrize("name", names())
@given(
    partition=st.permutations(range(4)).flatmap(
        lambda order: st.integers(1, 3).map(lambda cut: (order[:cut], order[cut:]))
    )
)
@settings(max_examples=20, deadline=None)
def test_any_partition_into_microbatches_merges_to_the_whole(name, partition) -> None:
    request = rollout_request(name)
    lp = [-torch.rand(n, generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    whole = evaluate(request.loss, torch.cat(lp), request.batch(range(4)), request.config).metrics
    parts = [
        evaluate(request.loss, torch.cat([lp[i] for i in part]), request.batch(part), request.config).metrics
        for part in partition
    ]
    merged = merge(parts)
    assert merged == pytest.approx(whole, rel=1e-12, abs=1e-12)
    for key in ("tokens:sum", "loss_tokens:sum"):
        assert merged[key] == whole[key]


def test_three_tokens_of_loss_1_and_one_of_loss_5_report_8() -> None:
    data = [DatumInputs(n, {"target_tokens": torch.zeros(n, dtype=torch.int64)}) for n in (3, 1)]
    request = check("cross_entropy", {}, data)
    lp_N = torch.tensor([-1.0, -1.0, -1.0, -5.0])
    assert evaluate(request.loss, lp_N, request.batch([0, 1]), request.config).metrics["loss:sum"] == 8.0


@pytest.mark.parametrize("name", names())
def test_every_metric_key_has_one_colon_and_a_reduction_that_merges(name) -> None:
    request = rollout_request(name)
    metrics = evaluate(
        request.loss, -torch.rand(sum(LENGTHS)), request.batch(range(4)), request.config
    ).metrics
    assert "loss:sum" in metrics
    for key in metrics:
        base, reduction = key.split(":")
        assert base
        assert reduction in ("sum", "max", "min")


def test_two_losses_over_the_same_logprobs_each_keep_their_own_sum() -> None:
    tight = rollout_request("ppo", {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0})
    loose = rollout_request("ppo", {"clip_low_threshold": 0.0, "clip_high_threshold": 100.0})
    unclipped = rollout_request("importance_sampling")
    lp_N = -torch.rand(sum(LENGTHS))
    values = [
        evaluate(request.loss, lp_N, request.batch(range(4)), request.config).metrics["loss:sum"]
        for request in (tight, loose, unclipped)
    ]
    assert values[1] == pytest.approx(values[2], rel=1e-6)
    assert values[0] > values[1] + 0.1  # the pessimistic bound


def test_small_terms_are_not_lost_beside_large_ones() -> None:
    n = 4096
    request = check(
        "cross_entropy", {}, [DatumInputs(n, {"target_tokens": torch.zeros(n, dtype=torch.int64)})]
    )
    lp_N = torch.full((n,), -(2.0**-12))
    lp_N[0] = -(2.0**24)  # in float32, 2^24 + 2^-12 is 2^24
    metrics = evaluate(request.loss, lp_N, request.batch([0]), request.config).metrics
    assert metrics["loss:sum"] == 2.0**24 + (n - 1) * 2.0**-12


def test_logprobs_of_another_shape_or_dtype_are_a_programming_error() -> None:
    request = rollout_request("ppo")
    batch = request.batch([0])
    with pytest.raises(ValueError, match=r"\(4,\).*\(3,\)"):
        evaluate(get("ppo"), torch.zeros(4), batch, request.config)
    with pytest.raises(ValueError, match="float64"):
        evaluate(get("ppo"), torch.zeros(3, dtype=torch.float64), batch, request.config)


def test_merge_adds_sums_left_to_right_and_keeps_extremes() -> None:
    parts = [{"a:sum": 1e16, "b:max": 1.0, "c:min": 1.0}, {"a:sum": 1.0, "b:max": 3.0, "c:min": -2.0}]
    parts.append({"a:sum": -1e16, "b:max": 2.0, "c:min": 0.0})
    assert merge(parts) == {"a:sum": 0.0, "b:max": 3.0, "c:min": -2.0}  # (1e16 + 1) − 1e16 in float64


def test_merge_keeps_nan_wherever_it_stands() -> None:
    for values in ([math.nan, 1.0], [1.0, math.nan]):
        merged = merge([{"a:sum": v, "b:max": v, "c:min": v} for v in values])
        assert all(math.isnan(value) for value in merged.values())


def test_merge_refuses_parts_that_do_not_belong_together() -> None:
    with pytest.raises(ValueError, match="b:sum"):
        merge([{"a:sum": 1.0, "b:sum": 1.0}, {"a:sum": 1.0}])
    with pytest.raises(ValueError, match="nothing to merge"):
        merge([])
    with pytest.raises(ValueError, match="a:mean"):
        merge([{"a:mean": 1.0}, {"a:mean": 1.0}])
