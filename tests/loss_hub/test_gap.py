"""The rollout/train gap against its definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loss_hub import DatumInputs, check, evaluate

LP = [-1.0, -2.5, -0.125, -3.0]


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro"])
def test_logprobs_half_a_nat_lower_report_a_mean_gap_of_one_half(run, name) -> None:
    evaluation, _ = run(name, LP, logprobs=[lp - 0.5 for lp in LP], advantages=[1.0, -1.0, 2.0, 0.0])
    metrics = evaluation.metrics
    assert metrics["rollout_tokens:sum"] == 4
    assert metrics["rollout_gap:sum"] / metrics["rollout_tokens:sum"] == pytest.approx(0.5, abs=1e-6)
    assert metrics["rollout_gap_abs:max"] == pytest.approx(0.5, abs=1e-6)
    assert metrics["rollout_ratio:sum"] ** 2 / metrics["rollout_ratio_sq:sum"] == pytest.approx(4)


row = st.tuples(st.floats(-8, 0, width=32), st.floats(-8, 0, width=32), st.floats(-3, 3, width=32))


@given(rows=st.lists(row, min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_sums_are_those_of_the_definitions_over_sampled_tokens(
    rows: list[tuple[float, float, float]],
) -> None:
    lp, q, adv = torch.tensor(rows, dtype=torch.float32).T.contiguous()
    inputs = {"target_tokens": torch.zeros(len(rows), dtype=torch.int64), "logprobs": q, "advantages": adv}
    request = check("importance_sampling", {}, [DatumInputs(len(rows), inputs)])
    metrics = evaluate(request.loss, lp, request.batch([0]), request.config).metrics

    gaps = [p - r for p, r, a in rows if a != 0 or r != 0]
    expected = {
        "rollout_tokens:sum": len(gaps),
        "rollout_nonfinite_tokens:sum": 0,
        "rollout_gap:sum": math.fsum(gaps),
        "rollout_gap_abs:sum": math.fsum(abs(d) for d in gaps),
        "rollout_gap_abs:max": max((abs(d) for d in gaps), default=0.0),
        "kl_k1:sum": math.fsum(-d for d in gaps),
        "kl_k2:sum": math.fsum(d * d / 2 for d in gaps),
        "kl_k3:sum": math.fsum(math.exp(d) - 1 - d for d in gaps),
        "rollout_ratio:sum": math.fsum(math.exp(d) for d in gaps),
        "rollout_ratio_sq:sum": math.fsum(math.exp(2 * d) for d in gaps),
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_k3_of_a_tiny_gap_is_not_lost_to_rounding(run) -> None:
    q, lp = -1.0, -1.0 + 2.0**-20
    evaluation, _ = run("importance_sampling", [lp], logprobs=[q], advantages=[1.0])
    d = 2.0**-20
    assert evaluation.metrics["kl_k3:sum"] == pytest.approx(d * d / 2 + d**3 / 6, rel=1e-3)


def test_prompts_have_no_gap_and_sampled_tokens_without_advantage_have_one(run) -> None:
    evaluation, _ = run(
        "ppo", [-5.0, -1.0, -2.0, -3.0], logprobs=[0.0, -1.5, 0.0, -math.inf], advantages=[0.0, 0.0, 1.0, 0.0]
    )
    metrics = evaluation.metrics
    assert metrics["rollout_tokens:sum"] == 2  # the second and the third
    assert metrics["rollout_gap:sum"] == 0.5 - 2.0
    assert metrics["tokens:sum"] == 4
    assert metrics["loss_tokens:sum"] == 1


def test_no_sampled_token_at_all_gives_zeros(run) -> None:
    evaluation, _ = run("ppo", [-5.0], logprobs=[0.0], advantages=[0.0])
    assert {value for key, value in evaluation.metrics.items() if key.startswith(("rollout", "kl"))} == {0.0}


def test_a_token_the_learner_gives_no_finite_logprob_is_counted_apart(run) -> None:
    evaluation, _ = run("ppo", [-math.inf, -1.0], logprobs=[-2.0, -1.5], advantages=[0.0, 1.0])
    assert evaluation.metrics["rollout_nonfinite_tokens:sum"] == 1
    assert evaluation.metrics["rollout_tokens:sum"] == 1
    assert evaluation.metrics["rollout_gap:sum"] == 0.5
