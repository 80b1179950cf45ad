"""Weights and advantages are real numbers of either sign: closed forms of loss and gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from actors.packing import PackingConfig
from loss_hub import DatumInputs
from tests.support import dumps, reference
from tests.support.models import Model, Step
from tests.support.requests import datums, packed

LENGTHS = (7, 3, 11, 2, 5)
NewModel = Callable[..., Model]
ROUNDING = 5e-6
"""A few float32 roundings of a logprob near −8; a matrix product's last bits depend on its size."""


@pytest.fixture(scope="module")
def transformers_model(small_folder: Path) -> torch.nn.Module:
    return reference.load(small_folder)


def run(model: Model, tokens: Sequence[torch.Tensor], inputs: Sequence[DatumInputs], **kwargs) -> Step:
    """One window of one call, and the step that ends it."""
    model.call(packed(tokens, inputs, **kwargs))
    return model.step()


@pytest.mark.parametrize("scale", [1 / 64, -1.0, -0.5, 256.0])
def test_a_weight_that_is_a_power_of_two_scales_loss_and_gradient_exactly(
    small_model: NewModel, scale: float
) -> None:
    tokens, ones = datums(LENGTHS, seed=5, weight=1.0)
    _, scaled = datums(LENGTHS, seed=5, weight=scale)
    one, other = small_model(b_seed=1), small_model(b_seed=1)
    plain, weighed = one.call(packed(tokens, ones)), other.call(packed(tokens, scaled))
    assert weighed.metrics["loss:sum"] == scale * plain.metrics["loss:sum"]
    gradient, reweighed = one.step(), other.step()
    assert reweighed.report.grad_norm == abs(scale) * gradient.report.grad_norm
    for name, values in gradient.gradient.items():
        assert torch.equal(reweighed.gradient[name], scale * values), name


def test_weights_of_zero_give_loss_zero_no_gradient_and_real_logprobs(
    small_model: NewModel, transformers_model: torch.nn.Module
) -> None:
    tokens, inputs = datums(LENGTHS, seed=6, weight=0.0)
    model = small_model()
    output = model.call(packed(tokens, inputs))
    assert output.metrics["loss:sum"] == 0.0
    assert output.metrics["loss_tokens:sum"] == 0
    assert output.metrics["tokens:sum"] == sum(LENGTHS)
    with torch.no_grad():
        wanted = [
            torch.log_softmax(transformers_model(input_ids=t[None]).logits[0], -1).gather(
                1, d.tensors["target_tokens"][:, None]
            )[:, 0]
            for t, d in zip(tokens, inputs, strict=True)
        ]
    assert reference.worst(output.logprobs, wanted) <= 1e-5
    step = model.step()
    assert step.report.grad_norm == 0.0
    assert all((values == 0).all() for values in step.gradient.values())


def test_a_datum_without_weight_adds_no_bit_to_the_gradient(small_model: NewModel) -> None:
    tokens, inputs = datums(LENGTHS, seed=7)
    zero_tokens, zero_inputs = datums((6,), seed=8, weight=0.0)
    packing = PackingConfig(max_datums_per_microbatch=1)
    alone = run(small_model(b_seed=1), tokens, inputs, packing=packing)
    joined = run(small_model(b_seed=1), tokens + zero_tokens, inputs + zero_inputs, packing=packing)
    for name, values in alone.gradient.items():
        assert torch.equal(joined.gradient[name], values), name


@pytest.mark.parametrize(
    ("loss", "advantage", "per_token"),
    [
        ("importance_sampling", 2.0, -3.297443),
        ("ppo", 2.0, -2.4),  # the ratio e^0.5 is clipped at 1.2
        ("ppo", -2.0, 3.297443),  # pessimistic: not clipped where the advantage is negative
        ("gspo", 2.0, -2.0008),  # clipped at 1.0004
        ("gspo", -2.0, 3.297443),
        ("cispo", 2.0, None),
        ("dro", 2.0, None),
    ],
)
def test_losses_have_their_closed_form_where_every_ratio_is_the_root_of_e(
    small_model: NewModel, loss: str, advantage: float, per_token: float | None
) -> None:
    model = small_model(b_seed=1)
    tokens, inputs = datums(LENGTHS, seed=9, weight=0.0)
    lp = [torch.from_numpy(x) for x in model.call(packed(tokens, inputs, forward_only=True)).logprobs]
    probes = [
        DatumInputs(
            d.length,
            {
                "target_tokens": d.tensors["target_tokens"],
                "logprobs": values - 0.5,
                "advantages": torch.full((d.length,), advantage),
                **({"sequence_ratio_mask": torch.ones(d.length)} if loss == "gspo" else {}),
            },
        )
        for d, values in zip(inputs, lp, strict=True)
    ]
    metrics = model.call(packed(tokens, probes, loss=loss)).metrics
    N, total = sum(LENGTHS), float(torch.cat(lp).double().sum())
    wanted = {
        "cispo": -math.exp(0.5) * advantage * total,  # e^0.5 is below the bound of 4
        "dro": -(advantage * total - 0.5 * 0.05 * 0.25 * N),
    }.get(loss, per_token and per_token * N)
    assert metrics["loss:sum"] == pytest.approx(wanted, rel=1e-6)
    assert metrics["rollout_gap:sum"] / metrics["rollout_tokens:sum"] == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
@pytest.mark.parametrize("nothing", [math.nan, -math.inf])
def test_rollout_logprobs_that_nobody_measured_change_no_bit_of_the_step(
    small_model: NewModel, loss: str, nothing: float
) -> None:
    """A prompt has advantage 0; its rollout logprob is 0, or NaN, or −inf, as the client likes."""
    tokens, inputs = datums(LENGTHS, loss=loss, seed=10)
    steps, metrics = [], []
    for prompt in (0.0, nothing):
        probes = []
        for datum in inputs:
            tensors = {name: t.clone() for name, t in datum.tensors.items()}
            tensors["advantages"][:2], tensors["logprobs"][:2] = 0.0, prompt
            if loss == "gspo":
                tensors["sequence_ratio_mask"][:2] = 0.0
            probes.append(DatumInputs(datum.length, tensors))
        model = small_model(b_seed=1)
        metrics.append(model.call(packed(tokens, probes, loss=loss)).metrics)
        steps.append(model.step())
    assert math.isfinite(metrics[1]["loss:sum"])
    assert metrics[1] == metrics[0]
    assert not steps[1].report.skipped
    for name, values in steps[0].after.items():
        assert torch.equal(steps[1].after[name], values), name


def test_gspo_of_sequences_in_one_microbatch_is_that_of_one_in_each(small_model: NewModel) -> None:
    """Gaps of 0.1, 0.2, … by sequence: a mean over the microbatch would give them all one ratio."""
    tokens, inputs = datums(LENGTHS, loss="gspo", seed=13)
    model = small_model(b_seed=1)
    scored = model.call(packed(tokens, inputs, loss="gspo", forward_only=True))
    for number, (datum, lp) in enumerate(zip(inputs, scored.logprobs, strict=True), 1):
        datum.tensors["logprobs"] = torch.from_numpy(lp) - 0.1 * number
    by_hand = -sum(
        math.exp(0.1 * number) * float(datum.tensors["advantages"].double().sum())
        for number, datum in enumerate(inputs, 1)
    )
    bounds: dict[str, float | str] = {"clip_low_threshold": 0.0, "clip_high_threshold": 100.0}
    found = []
    for packing in (PackingConfig(), PackingConfig(max_datums_per_microbatch=1)):
        model = small_model(b_seed=1)
        request = packed(tokens, inputs, loss="gspo", config=bounds, packing=packing)
        assert len(request.microbatches) == (len(LENGTHS) if packing.max_datums_per_microbatch else 1)
        assert model.call(request).metrics["loss:sum"] == pytest.approx(by_hand, abs=1e-4)
        found.append(dumps.vector(model.step().gradient))
    assert dumps.relative_l2(*found) <= 1e-6
