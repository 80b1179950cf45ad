"""Every loss against its documented formula, written here a second time in float64 and differentiated by
torch, over any lengths, signs and ratios; and against closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loss_hub import DatumInputs, check, evaluate

Formula = Callable[[Tensor, Tensor, Tensor], Tensor]


def importance_sampling(lp: Tensor, q: Tensor, adv: Tensor) -> Tensor:
    return -(torch.exp(lp - q) * adv).sum()


def ppo(lp: Tensor, q: Tensor, adv: Tensor, low: float = 0.8, high: float = 1.2) -> Tensor:
    # Written by cases: past the bound that the advantage pushes towards, the term is a constant.
    ratio = torch.exp(lp - q)
    bound = torch.where(adv > 0, torch.full_like(lp, high), torch.full_like(lp, low))
    past = torch.where(adv > 0, ratio > high, ratio < low)
    return -torch.where(past, bound * adv, ratio * adv).sum()


def cispo(lp: Tensor, q: Tensor, adv: Tensor, low: float = 0.0, high: float = 4.0) -> Tensor:
    weight = torch.tensor([min(max(math.exp(x), low), high) for x in (lp - q).tolist()], dtype=torch.float64)
    return -(weight * lp * adv).sum()


def dro(lp: Tensor, q: Tensor, adv: Tensor, beta: float = 0.05) -> Tensor:
    prompt = (adv == 0) & (q == 0)
    return -(lp * adv - 0.5 * beta * (lp - q) ** 2)[~prompt].sum()


ROLLOUT_LOSSES: dict[str, Formula] = {
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
}

logprob = st.floats(-8, -0.015625, width=32)
log_ratio = st.floats(-3, 3, width=32)
real = st.floats(-50, 50, width=32) | st.just(0.0)


@st.composite
def tokens(draw: st.DrawFn) -> list[tuple[float, float, float]]:
    """(lp, q, A) of every token; some are prompt tokens, with q = A = 0."""
    sampled = st.tuples(logprob, log_ratio, real).map(lambda t: (t[0], t[0] - t[1], t[2]))
    prompt = logprob.map(lambda lp: (lp, 0.0, 0.0))
    return draw(st.lists(sampled | prompt, min_size=1, max_size=40))


def away_from(ratio: Tensor, *bounds: float) -> bool:
    """Whether float32 and float64 agree on which side of each bound every ratio lies."""
    return all(bool(((ratio - bound).abs() > 1e-5).all()) for bound in bounds)


@pytest.mark.parametrize("name", ROLLOUT_LOSSES)
@given(rows=tokens())
@settings(max_examples=60, deadline=None)
def test_value_and_gradient_are_those_of_the_documented_formula(
    name: str, rows: list[tuple[float, float, float]]
) -> None:
    columns = torch.tensor(rows, dtype=torch.float32).T.contiguous()
    wide_lp, wide_q, wide_adv = columns.double()
    if not away_from(torch.exp(wide_lp - wide_q), 0.8, 1.2, 4.0):
        return
    wide_lp.requires_grad_()
    expected = ROLLOUT_LOSSES[name](wide_lp, wide_q, wide_adv)
    expected.backward()

    lp, q, adv = columns
    lp.requires_grad_()
    inputs = {"target_tokens": torch.zeros(len(rows), dtype=torch.int64), "logprobs": q, "advantages": adv}
    request = check(name, {}, [DatumInputs(len(rows), inputs)])
    evaluation = evaluate(request.loss, lp, request.batch([0]), request.config)
    evaluation.loss_sum.backward()

    scale = max(1.0, float((torch.exp(wide_lp - wide_q) * wide_adv).detach().abs().sum()))
    assert evaluation.loss_sum.item() == pytest.approx(expected.item(), abs=2e-5 * scale)
    assert lp.grad is not None
    torch.testing.assert_close(lp.grad.double(), wide_lp.grad, rtol=2e-5, atol=1e-5)


@given(
    rows=st.lists(st.tuples(logprob, st.floats(-1e3, 1e3, width=32)), min_size=1, max_size=40),
    k=st.none() | st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_cross_entropy_is_the_weighted_sum_over_positions_and_targets(
    rows: list[tuple[float, float]], k: int | None
) -> None:
    n = len(rows)
    lp, weights = torch.tensor(rows, dtype=torch.float32).T.contiguous()
    if k is not None:
        lp, weights = lp.repeat(k, 1).T.contiguous(), weights.repeat(k, 1).T.contiguous()
    lp.requires_grad_()
    inputs = {"target_tokens": torch.zeros(lp.shape, dtype=torch.int64), "weights": weights}
    request = check("cross_entropy", {}, [DatumInputs(n, inputs)])
    evaluation = evaluate(request.loss, lp, request.batch([0]), request.config)
    evaluation.loss_sum.backward()

    expected = math.fsum(-p * w for p, w in rows) * (k or 1)
    scale = max(1.0, sum(abs(p * w) for p, w in rows) * (k or 1))
    assert evaluation.loss_sum.item() == pytest.approx(expected, abs=1e-6 * scale)
    assert lp.grad is not None
    assert torch.equal(lp.grad, torch.where(weights == 0, 0.0, -weights))


# ---- the ratio probe: q = lp − 0.5, every ratio e^0.5

LP = [-1.0, -2.5, -0.125, -3.0]
Q = [lp - 0.5 for lp in LP]
RATIO = math.exp(0.5)  # 1.648721


@pytest.mark.parametrize(
    ("name", "advantage", "per_token", "gradient"),
    [
        ("importance_sampling", 2.0, -3.297443, -3.297443),
        ("importance_sampling", -2.0, 3.297443, 3.297443),
        ("ppo", 2.0, -2.4, 0.0),  # clipped at 1.2: no gradient left
        ("ppo", -2.0, 3.297443, 3.297443),  # pessimistic: not clipped from above
    ],
)
def test_ratio_probe_has_its_closed_form(run, name, advantage, per_token, gradient) -> None:
    evaluation, grad = run(name, LP, logprobs=Q, advantages=[advantage] * 4)
    assert evaluation.metrics["loss:sum"] == pytest.approx(4 * per_token, rel=1e-6)
    assert grad.tolist() == pytest.approx([gradient] * 4, rel=1e-6)


def test_cispo_without_a_config_leaves_ratios_up_to_4_and_stops_the_gradient_through_them(run) -> None:
    evaluation, grad = run("cispo", LP, logprobs=Q, advantages=[2.0] * 4)
    assert evaluation.metrics["loss:sum"] == pytest.approx(-RATIO * 2 * sum(LP), rel=1e-6)
    assert grad.tolist() == pytest.approx([-RATIO * 2] * 4, rel=1e-6)
    assert evaluation.metrics["clipped_tokens:sum"] == 0

    far, _ = run(
        "cispo", [-1.0, -1.0], logprobs=[-3.0, -1.0], advantages=[1.0, 1.0]
    )  # ratios e² = 7.39 and 1
    assert far.metrics["loss:sum"] == pytest.approx(4 + 1, rel=1e-6)
    assert far.metrics["clipped_tokens:sum"] == 1


def test_dro_adds_half_beta_times_the_squared_gap(run) -> None:
    evaluation, grad = run("dro", LP, logprobs=Q, advantages=[2.0] * 4)
    assert evaluation.metrics["loss:sum"] == pytest.approx(-2 * sum(LP) + 4 * 0.5 * 0.05 * 0.25, rel=1e-6)
    assert grad.tolist() == pytest.approx([-2 + 0.05 * 0.5] * 4, rel=1e-6)


def test_dro_leaves_prompt_positions_alone_and_holds_sampled_ones_without_advantage(run) -> None:
    evaluation, grad = run("dro", [-3.0, -1.0], {"beta": 2.0}, logprobs=[0.0, -1.5], advantages=[0.0, 0.0])
    assert evaluation.metrics["loss:sum"] == pytest.approx(0.5 * 2 * 0.25)  # the prompt would add 0.5·2·9
    assert grad.tolist() == pytest.approx([0.0, 2 * 0.5])
    assert evaluation.metrics["loss_tokens:sum"] == 1


@pytest.mark.parametrize("name", ["ppo", "cispo"])
def test_thresholds_are_absolute_ratios_of_this_request(run, name) -> None:
    bounds = {"clip_low_threshold": 2.0, "clip_high_threshold": 3.0}
    evaluation, grad = run(name, [-1.0], bounds, logprobs=[-1.5], advantages=[-1.0])  # ratio 1.65 → 2
    assert evaluation.metrics["loss:sum"] == pytest.approx(2.0 if name == "ppo" else -2.0)
    assert grad.tolist() == pytest.approx([0.0 if name == "ppo" else 2.0])
    assert evaluation.metrics["clipped_tokens:sum"] == 1


def test_importance_sampling_is_never_clipped(run) -> None:
    evaluation, grad = run("importance_sampling", [-1.0], logprobs=[-11.0], advantages=[1.0])
    assert evaluation.metrics["loss:sum"] == pytest.approx(-math.exp(10), rel=1e-6)
    assert grad.item() == pytest.approx(-math.exp(10), rel=1e-6)


# ---- cross_entropy weights


def test_a_weight_of_one_64th_scales_the_gradient_by_exactly_that(run) -> None:
    _, whole = run("cross_entropy", LP, weights=[1.0, -2.0, 3.0, 1.0])
    _, scaled = run("cross_entropy", LP, weights=[1 / 64, -2 / 64, 3 / 64, 1 / 64])
    assert torch.equal(scaled, whole * 0.015625)


def test_weights_of_either_sign_and_zero_give_the_plain_sum(run) -> None:
    evaluation, grad = run("cross_entropy", [-1.0, -2.0, -4.0], weights=[-1.0, 0.0, 2.0])
    assert evaluation.metrics["loss:sum"] == -1.0 + 8.0
    assert grad.tolist() == [1.0, 0.0, -2.0]
    assert evaluation.metrics["weights:sum"] == 1.0


def test_all_zero_weights_give_loss_zero(run) -> None:
    evaluation, grad = run("cross_entropy", LP, weights=[0.0] * 4)
    assert evaluation.metrics["loss:sum"] == 0.0
    assert grad.tolist() == [0.0] * 4
    assert evaluation.metrics["loss_tokens:sum"] == 0
    assert evaluation.metrics["tokens:sum"] == 4


def test_weights_left_out_are_one_everywhere(run) -> None:
    evaluation, grad = run("cross_entropy", [-1.0, -2.0])
    assert evaluation.metrics["loss:sum"] == 3.0
    assert grad.tolist() == [-1.0, -1.0]


def test_k_targets_a_position_sum_over_k(run) -> None:
    evaluation, grad = run("cross_entropy", [[-1.0, -2.0], [-3.0, -4.0]], weights=[[0.75, 0.25], [0.0, -1.0]])
    assert evaluation.metrics["loss:sum"] == 0.75 + 0.5 - 4.0
    assert grad.tolist() == [[-0.75, -0.25], [0.0, 1.0]]
    assert evaluation.metrics["tokens:sum"] == 2


# ---- masked positions


@pytest.mark.parametrize("bad", [-math.inf, math.nan, math.inf])
def test_a_bad_logprob_under_weight_zero_leaves_loss_and_gradient_finite(run, bad) -> None:
    evaluation, grad = run("cross_entropy", [bad, -2.0], weights=[0.0, 1.0])
    assert evaluation.metrics["loss:sum"] == 2.0
    assert grad.tolist() == [0.0, -1.0]


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo"])
@pytest.mark.parametrize("bad", [-math.inf, math.nan, math.inf])
@pytest.mark.parametrize("rollout", [0.0, -1.0, -math.inf, math.nan, -200.0])
def test_a_bad_logprob_without_advantage_leaves_loss_gradient_and_metrics_finite(
    run, name, bad, rollout
) -> None:
    evaluation, grad = run(name, [bad, -2.0], logprobs=[rollout, -2.0], advantages=[0.0, 1.0])
    clean, clean_grad = run(name, [-2.0], logprobs=[-2.0], advantages=[1.0])
    assert evaluation.metrics["loss:sum"] == clean.metrics["loss:sum"]
    assert grad.tolist() == [0.0, clean_grad.item()]
    assert all(math.isfinite(value) for value in evaluation.metrics.values())


@pytest.mark.parametrize("bad", [-math.inf, math.nan])
def test_a_bad_logprob_on_a_prompt_leaves_dro_finite(run, bad) -> None:
    evaluation, grad = run("dro", [bad, -2.0], logprobs=[0.0, -2.0], advantages=[0.0, 1.0])
    assert evaluation.metrics["loss:sum"] == 2.0
    assert grad.tolist() == [0.0, -1.0]
