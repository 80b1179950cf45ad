"""GSPO against its documented formula, written here datum by datum in float64 and differentiated by torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loss_hub import CheckedRequest, DatumInputs, Evaluation, check, evaluate

Row = tuple[float, float, float, float]
"""(lp, q, A, mask) of one token."""

logprob = st.floats(-8, -0.015625, width=32)
real = st.floats(-50, 50, width=32) | st.just(0.0)
token = st.tuples(logprob, st.floats(-3, 3, width=32), real, st.sampled_from([0.0, 1.0, 1.0, -2.0])).map(
    lambda t: (t[0], t[0] - t[1], t[2], t[3])
)
sequences = st.lists(st.lists(token, min_size=1, max_size=12), min_size=1, max_size=6)
LOW, HIGH = 0.8, 1.25
BOUNDS = {"clip_low_threshold": LOW, "clip_high_threshold": HIGH}


def columns(sequence: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lp, q, adv, mask = torch.tensor(sequence, dtype=torch.float32).T.contiguous()
    return lp, q, adv, mask


def request_of(data: Sequence[Sequence[Row]], config: dict[str, float] | None = None) -> CheckedRequest:
    inputs = []
    for sequence in data:
        _, q, adv, mask = columns(sequence)
        tensors = {"target_tokens": torch.zeros(len(sequence), dtype=torch.int64), "logprobs": q}
        inputs.append(DatumInputs(len(sequence), tensors | {"advantages": adv, "sequence_ratio_mask": mask}))
    return check("gspo", config or {}, inputs)


def trained(
    request: CheckedRequest, indices: Sequence[int], lp: Sequence[Tensor]
) -> tuple[Evaluation, Tensor]:
    """The evaluation of one microbatch, and the gradient of its tokens."""
    lp_N = torch.cat([lp[i] for i in indices]).requires_grad_()
    evaluation = evaluate(request.loss, lp_N, request.batch(indices), request.config)
    evaluation.loss_sum.backward()
    assert lp_N.grad is not None
    return evaluation, lp_N.grad


def formula(lp: Tensor, q: Tensor, adv: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """Of one sequence. By cases, as in `ppo`: past the bound that the advantage pushes towards, a constant."""
    chosen = [float(p - r) for p, r, m in zip(lp.detach(), q, mask, strict=True) if m != 0]
    log_ratio = math.fsum(chosen) / len(chosen) if chosen else 0.0
    ratio = torch.exp(log_ratio + lp - lp.detach())
    bound = torch.where(adv > 0, torch.full_like(lp, high), torch.full_like(lp, low))
    past = torch.where(adv > 0, ratio > high, ratio < low)
    return -torch.where(past, bound * adv, ratio * adv).sum()


@given(data=sequences)
@settings(max_examples=80, deadline=None)
def test_value_and_gradient_of_a_microbatch_of_several_sequences_are_those_of_the_formula(
    data: list[list[Row]],
) -> None:
    wide = [torch.cat([c[None].double() for c in columns(sequence)]) for sequence in data]
    for lp, q, _, mask in wide:
        count = max(1, int((mask != 0).sum()))
        ratio = math.exp(float(torch.where(mask != 0, lp - q, 0.0).sum()) / count)
        if min(abs(ratio - LOW), abs(ratio - HIGH)) < 1e-5:
            return  # float32 and float64 may disagree on which side it lies
    lp_64 = [part[0].clone().requires_grad_() for part in wide]
    expected = torch.stack(
        [formula(lp, *part[1:], LOW, HIGH) for lp, part in zip(lp_64, wide, strict=True)]
    ).sum()
    expected.backward()

    request = request_of(data, BOUNDS)
    evaluation, gradient = trained(request, range(len(data)), [columns(sequence)[0] for sequence in data])
    scale = max(1.0, sum(float(part[2].abs().sum()) for part in wide) * math.exp(3))
    assert evaluation.loss_sum.item() == pytest.approx(expected.item(), abs=2e-6 * scale)
    wanted = torch.cat([lp.grad for lp in lp_64 if lp.grad is not None])
    torch.testing.assert_close(gradient.double(), wanted, rtol=2e-5, atol=1e-5)


@given(data=sequences, order=st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_what_shares_a_microbatch_with_a_sequence_changes_no_bit_of_its_gradient(data, order) -> None:
    request = request_of(data)
    lp = [columns(sequence)[0] for sequence in data]
    indices = list(range(len(data)))
    order.shuffle(indices)
    together, gradient = trained(request, indices, lp)
    alone = [trained(request, [i], lp) for i in indices]
    assert torch.equal(gradient, torch.cat([part for _, part in alone]))
    for key in ("loss:sum", "loss_tokens:sum", "clipped_tokens:sum"):
        assert together.metrics[key] == pytest.approx(
            math.fsum(one.metrics[key] for one, _ in alone), rel=1e-12, abs=1e-12
        )


# ---- the ratio probe: q = lp − 0.5, every ratio e^0.5 = 1.648721

LP = [-1.0, -2.5, -0.125, -3.0]


def probe(run, advantage: float, mask: Sequence[float], gaps: Sequence[float] = (0.5,) * 4, **config: float):
    q = [lp - gap for lp, gap in zip(LP, gaps, strict=True)]
    return run("gspo", LP, config, logprobs=q, advantages=[advantage] * 4, sequence_ratio_mask=mask)


def test_ratio_probe_has_its_closed_form(run) -> None:
    up, resting = probe(run, 2.0, [1.0] * 4)  # clipped at 1.0004: no gradient left
    assert up.metrics["loss:sum"] == pytest.approx(4 * -2.0008, rel=1e-6)
    assert resting.tolist() == [0.0] * 4
    assert up.metrics["clipped_tokens:sum"] == 4
    down, pulled = probe(run, -2.0, [1.0] * 4)  # pessimistic: not clipped from above
    assert down.metrics["loss:sum"] == pytest.approx(4 * 3.297443, rel=1e-6)
    assert pulled.tolist() == pytest.approx([3.297443] * 4, rel=1e-6)


def test_the_ratio_of_a_sequence_is_the_mean_over_its_mask_alone(run) -> None:
    """Gaps 1, 0, 8, 8 under mask 1, 1, 0, 0: the mean is 0.5, and all four tokens have it."""
    loose = {"clip_low_threshold": 0.0, "clip_high_threshold": 100.0}
    found, gradient = probe(run, 2.0, [1.0, -3.0, 0.0, 0.0], (1.0, 0.0, 8.0, 8.0), **loose)
    assert found.metrics["loss:sum"] == pytest.approx(4 * -3.297443, rel=1e-6)
    assert gradient.tolist() == pytest.approx([-3.297443] * 4, rel=1e-6)


def test_without_a_token_in_the_mask_the_ratio_is_1(run) -> None:
    found, gradient = probe(run, 2.0, [0.0] * 4)
    assert found.metrics["loss:sum"] == -8.0
    assert gradient.tolist() == [-2.0] * 4
    nothing, none = probe(run, 0.0, [0.0] * 4)
    assert nothing.metrics["loss:sum"] == 0.0
    assert none.tolist() == [0.0] * 4
    assert all(math.isfinite(value) for value in nothing.metrics.values())


def test_a_token_of_the_mask_without_advantage_moves_the_mean_and_has_no_gradient(run) -> None:
    inputs = {"logprobs": [-1.0, -3.0], "advantages": [1.0, 0.0], "sequence_ratio_mask": [1.0, 1.0]}
    loose = {"clip_low_threshold": 0.0, "clip_high_threshold": 100.0}
    found, gradient = run("gspo", [-1.0, -2.0], loose, **inputs)  # gaps 0 and 1: e^0.5
    assert found.metrics["loss:sum"] == pytest.approx(-1.648721, rel=1e-6)
    assert gradient.tolist() == pytest.approx([-1.648721, 0.0], rel=1e-6)


@pytest.mark.parametrize("bad", [-math.inf, math.nan, math.inf])
@pytest.mark.parametrize("rollout", [0.0, -math.inf, math.nan])
def test_a_bad_logprob_of_a_prompt_leaves_loss_gradient_and_metrics_finite(run, bad, rollout) -> None:
    inputs = {"logprobs": [rollout, -2.0], "advantages": [0.0, 1.0], "sequence_ratio_mask": [0.0, 1.0]}
    found, gradient = run("gspo", [bad, -2.0], **inputs)
    assert found.metrics["loss:sum"] == -1.0
    assert gradient.tolist() == [0.0, -1.0]
    assert all(math.isfinite(value) for value in found.metrics.values())
